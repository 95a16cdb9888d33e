package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	v1 "kubevirt.io/api/core/v1"

	cloudinit "kubevirt.io/kubevirt/pkg/cloud-init"
	"kubevirt.io/kubevirt/pkg/hooks"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/api"
)

type callOptions struct {
	host
	sockets      string
	sidecars     uint
	patience     time.Duration
	domain       string
	calls        int
	chained      bool
	placeholders int
	rootPorts    int
	cloudInit    bool
	shutdown     bool
}

// report is what a virt-launcher would have seen, step by step.
type report struct {
	Collect   step   `json:"collect"`
	CloudInit *step  `json:"cloudInit,omitempty"`
	Calls     []step `json:"calls"`
	Shutdown  *step  `json:"shutdown,omitempty"`
}

type step struct {
	Sent     string                   `json:"sent,omitempty"`
	Returned string                   `json:"returned,omitempty"`
	Data     *cloudinit.CloudInitData `json:"data,omitempty"`
	Error    string                   `json:"error,omitempty"`
	Seconds  float64                  `json:"seconds"`
}

func parseCallOptions(args []string) (callOptions, error) {
	flags := flag.NewFlagSet("call-hook", flag.ExitOnError)
	options := callOptions{host: hostFlags(flags)}
	flags.StringVar(&options.sockets, "sockets", "", "folder that holds hook-sidecar-N/*.sock (required)")
	flags.UintVar(&options.sidecars, "sidecars", 1, "number of sidecars to collect")
	flags.DurationVar(&options.patience, "collect-timeout", 10*time.Second, "patience with missing sidecars")
	flags.StringVar(&options.domain, "domain", "", "file with the domain XML to begin with; none: converted from the VMI")
	flags.IntVar(&options.calls, "calls", 3, "calls of OnDefineDomain: as many as virt-launcher makes are 1, 2 or 3")
	flags.BoolVar(&options.chained, "chained", false, "feed every answer into the next call, for any number of calls")
	flags.IntVar(&options.placeholders, "placeholders", 4, "placeholder interfaces in the first of three calls")
	flags.IntVar(&options.rootPorts, "root-ports", 4, "root ports that the last of several calls adds")
	flags.BoolVar(&options.cloudInit, "pre-cloud-init-iso", false, "call PreCloudInitIso first")
	flags.BoolVar(&options.shutdown, "shutdown", true, "call Shutdown last")
	_ = flags.Parse(args)
	if options.sockets == "" {
		return options, errors.New("-sockets FOLDER is missing")
	}
	if options.calls < 0 || (options.calls > 3 && !options.chained) {
		return options, fmt.Errorf("-calls %d: virt-launcher makes 1 to 3 calls, more only with -chained", options.calls)
	}
	folder, err := filepath.Abs(options.sockets)
	options.sockets = folder
	return options, err
}

func runCallHook(args []string) error {
	if _, err := parseCallOptions(args); err != nil {
		return err
	}
	return runInsideNamespace(args)
}

func runCallHookInside(args []string) error {
	options, err := parseCallOptions(args)
	if err != nil {
		return err
	}
	vmi, err := readVMI(os.Stdin)
	if err != nil {
		return err
	}
	spec, err := firstSpec(vmi, options)
	if err != nil {
		return err
	}
	if err := mountSockets(options.sockets); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(callHooks(vmi, spec, options))
}

func firstSpec(vmi *v1.VirtualMachineInstance, options callOptions) (*api.DomainSpec, error) {
	if options.domain == "" {
		return domainSpec(vmi, options.host)
	}
	text, err := os.ReadFile(options.domain)
	if err != nil {
		return nil, err
	}
	spec := &api.DomainSpec{}
	if err := xml.Unmarshal(text, spec); err != nil {
		return nil, fmt.Errorf("-domain %s: %w", options.domain, err)
	}
	// Go's encoder drops the declaration when it reads a domain; the converter always sets it.
	spec.XmlNS = "http://libvirt.org/schemas/domain/qemu/1.0"
	return spec, nil
}

// callHooks follows virt-launcher: any failure ends the domain's start, and Shutdown is called
// in any case, as it is when a launcher ends.
func callHooks(vmi *v1.VirtualMachineInstance, spec *api.DomainSpec, options callOptions) report {
	manager := hooks.GetManager()
	var out report
	out.Calls = []step{}
	out.Collect = timed(func(*step) error { return manager.Collect(options.sidecars, options.patience) })
	if out.Collect.Error != "" {
		return out
	}
	failed := false
	if options.cloudInit {
		cloudInit := timed(func(made *step) error { return preCloudInitISO(manager, vmi, made) })
		out.CloudInit, failed = &cloudInit, cloudInit.Error != ""
	}
	define := func(spec *api.DomainSpec) {
		if failed {
			return
		}
		call := timed(func(made *step) error { return defineDomain(manager, vmi, spec, made) })
		out.Calls = append(out.Calls, call)
		failed = call.Error != ""
	}
	switch {
	case options.chained:
		for range options.calls {
			define(spec)
		}
	case options.calls > 0:
		if options.calls == 3 {
			// virt-launcher defines a copy with placeholders, so that libvirt gives every device an
			// address, and continues with the devices it got back, the placeholders left out.
			placeheld := withPlaceholders(spec, options.placeholders)
			define(placeheld)
			placeheld.Devices.Interfaces = spec.Devices.Interfaces
			spec.Devices = placeheld.Devices
		}
		define(spec)
		if options.calls > 1 {
			addRootPorts(spec, options.rootPorts)
			define(spec)
		}
	}
	if options.shutdown {
		shutdown := timed(func(*step) error { return manager.Shutdown() })
		out.Shutdown = &shutdown
	}
	return out
}

// defineDomain is virt-launcher's ApplySidecarHooks: the answer replaces the wanted spec, as far as
// KubeVirt's schema of a domain knows its elements.
func defineDomain(manager hooks.Manager, vmi *v1.VirtualMachineInstance, spec *api.DomainSpec, made *step) error {
	var err error
	if made.Sent, err = domainXML(spec); err != nil {
		return err
	}
	if made.Returned, err = manager.OnDefineDomain(spec, vmi); err != nil {
		return err
	}
	answered := &api.DomainSpec{}
	if err := xml.Unmarshal([]byte(made.Returned), answered); err != nil {
		return err
	}
	answered.DeepCopyInto(spec)
	return nil
}

func preCloudInitISO(manager hooks.Manager, vmi *v1.VirtualMachineInstance, made *step) error {
	data, err := cloudinit.ReadCloudInitVolumeDataSource(vmi, "")
	if err != nil {
		return err
	}
	if data == nil {
		return errors.New("the VMI has no cloud-init volume")
	}
	made.Data, err = manager.PreCloudInitIso(vmi, data)
	return err
}

func withPlaceholders(spec *api.DomainSpec, count int) *api.DomainSpec {
	out := spec.DeepCopy()
	for i := range count {
		name := "placeholder-" + strconv.Itoa(i)
		out.Devices.Interfaces = append(out.Devices.Interfaces, api.Interface{
			Type:   "ethernet",
			Model:  &api.Model{Type: "virtio-non-transitional"},
			Alias:  api.NewNonUserDefinedAlias(name),
			Target: &api.InterfaceTarget{Device: name, Managed: "no"},
		})
	}
	return out
}

func addRootPorts(spec *api.DomainSpec, count int) {
	last := 0
	for _, controller := range spec.Devices.Controllers {
		if index, err := strconv.Atoi(controller.Index); controller.Type == "pci" && err == nil {
			last = max(last, index)
		}
	}
	for i := range count {
		spec.Devices.Controllers = append(spec.Devices.Controllers, api.Controller{
			Type: "pci", Index: strconv.Itoa(last + 1 + i), Model: "pcie-root-port",
		})
	}
}

func timed(work func(*step) error) step {
	var made step
	began := time.Now()
	if err := work(&made); err != nil {
		made.Error = err.Error()
	}
	made.Seconds = time.Since(began).Seconds()
	return made
}
