// launcher-side runs the pieces of KubeVirt that stand between a VMI and its hook sidecars:
// admission's defaults, the converter to domain XML, and virt-launcher's client of the hooks.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"

	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const usage = `usage: launcher-side COMMAND [FLAGS] < VMI

  defaults       the VMI with all defaults of KubeVirt's admission, as JSON
  define-domain  the domain XML that virt-launcher makes of a defaulted VMI
  call-hook      collect hook sidecars, call them as virt-launcher does, report as JSON

The VMI is read from standard input, as YAML or JSON. COMMAND -h prints the flags.
`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	run, known := map[string]func([]string) error{
		"defaults":      runDefaults,
		"define-domain": runDefineDomain,
		"call-hook":     runCallHook,
		insideNamespace: runCallHookInside,
	}[os.Args[1]]
	if !known {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	if err := run(os.Args[2:]); err != nil {
		fmt.Fprintf(os.Stderr, "launcher-side %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}

func runDefaults(args []string) error {
	flags := flag.NewFlagSet("defaults", flag.ExitOnError)
	configuration := flags.String("configuration", "", "spec.configuration of the KubeVirt CR, as JSON")
	_ = flags.Parse(args)
	vmi, err := readVMI(os.Stdin)
	if err != nil {
		return err
	}
	config, err := clusterConfig(*configuration)
	if err != nil {
		return err
	}
	if err := applyDefaults(config, vmi); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(vmi)
}

func runDefineDomain(args []string) error {
	flags := flag.NewFlagSet("define-domain", flag.ExitOnError)
	host := hostFlags(flags)
	_ = flags.Parse(args)
	vmi, err := readVMI(os.Stdin)
	if err != nil {
		return err
	}
	spec, err := domainSpec(vmi, host)
	if err != nil {
		return err
	}
	text, err := domainXML(spec)
	if err != nil {
		return err
	}
	_, err = fmt.Println(text)
	return err
}

func readVMI(from io.Reader) (*v1.VirtualMachineInstance, error) {
	text, err := io.ReadAll(from)
	if err != nil {
		return nil, err
	}
	vmi := &v1.VirtualMachineInstance{}
	if err := yaml.UnmarshalStrict(text, vmi); err != nil {
		return nil, fmt.Errorf("standard input is not a VirtualMachineInstance: %w", err)
	}
	if vmi.Name == "" {
		return nil, fmt.Errorf("the VirtualMachineInstance on standard input has no metadata.name")
	}
	if vmi.Namespace == "" {
		vmi.Namespace = "default"
	}
	return vmi, nil
}
