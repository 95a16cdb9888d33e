// virt-controller is KubeVirt's own controller, which ends when its standard input does.
package main

import (
	"os"

	"kubevirt.io/kubevirt/pkg/virt-controller/watch"

	"kvplace.io/tests/control-plane/kubevirt/lifeline"
)

func main() {
	lifeline.Tie(func() { os.Exit(0) })
	watch.Execute()
}
