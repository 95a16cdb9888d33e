// One program that is a whole Kubernetes control plane for tests, chosen by its first argument.
//
// It links etcd, kube-apiserver, kube-scheduler, kube-controller-manager and kubectl, each exactly as its own
// project ships it, so that the tests talk to the real thing without containers and without downloaded binaries.
// Linking them together costs one build instead of five and shares most of the code.
//
// The promise that matters to a test run: a server started by this program ends as soon as its standard input
// reaches end of file. The program that starts it holds the other end of that pipe, so however it dies
// (SIGKILL included), nothing outlives it.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// servers run until their standard input ends; commands run once and leave standard input to themselves.
var (
	servers = map[string]func() int{
		"etcd":                    runEtcd,
		"kube-controller-manager": func() int { return runComponent(manager.NewControllerManagerCommand()) },
		"kube-apiserver":          func() int { return runComponent(apiserver.NewAPIServerCommand()) },
		"kube-scheduler":          func() int { return runComponent(scheduler.NewSchedulerCommand()) },
	}
	commands = map[string]func() int{
		"kubectl": func() int { return runComponent(kubectl.NewDefaultKubectlCommand()) },
		"pki":     runPKI,
	}
)

func main() {
	name := filepath.Base(os.Args[0])
	if !known(name) {
		if len(os.Args) < 2 || !known(os.Args[1]) {
			fmt.Fprintf(os.Stderr, "usage: %s {%s} ...\n", name, strings.Join(names(), "|"))
			os.Exit(2)
		}
		name = os.Args[1]
		os.Args = append([]string{name}, os.Args[2:]...)
	}
	if run, ok := servers[name]; ok {
		endWithStandardInput()
		os.Exit(run())
	}
	os.Exit(commands[name]())
}

func runComponent(command *cobra.Command) int {
	return cli.Run(command)
}

func known(name string) bool {
	_, isServer := servers[name]
	_, isCommand := commands[name]
	return isServer || isCommand
}
