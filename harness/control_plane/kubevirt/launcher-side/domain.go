package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"

	v1 "kubevirt.io/api/core/v1"

	ephemeraldisk "kubevirt.io/kubevirt/pkg/ephemeral-disk"
	cmdv1 "kubevirt.io/kubevirt/pkg/handler-launcher-com/cmd/v1"
	"kubevirt.io/kubevirt/pkg/os/disk"
	"kubevirt.io/kubevirt/pkg/util/hardware"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/api"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/converter"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/converter/arch"
	convertertypes "kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/converter/types"
)

const (
	maxCPUs            = 50000
	memoryStatsSeconds = 10
)

// host is what virt-launcher learns from its node and its container.
type host struct {
	cpuset    *string
	topology  *string
	emulation *bool
	kvm       *bool
}

func hostFlags(flags *flag.FlagSet) host {
	return host{
		cpuset:    flags.String("cpuset", "", "CPUs of the compute container, as in cpuset.cpus (2-5,34)"),
		topology:  flags.String("topology", "", `host topology as JSON, {"numa_cells": [...]}, KubeVirt's cmd.v1 Topology`),
		emulation: flags.Bool("emulation", false, "let the VM run without /dev/kvm, as QEMU's own emulation"),
		kvm:       flags.Bool("kvm", true, "the node has /dev/kvm"),
	}
}

// domainSpec converts a defaulted VMI as virt-launcher does before it defines the domain.
func domainSpec(vmi *v1.VirtualMachineInstance, host host) (*api.DomainSpec, error) {
	context, err := converterContext(vmi, host)
	if err != nil {
		return nil, err
	}
	domain := &api.Domain{}
	if err := converter.Convert_v1_VirtualMachineInstance_To_api_Domain(vmi, domain, context); err != nil {
		return nil, fmt.Errorf("cannot convert %s/%s: %w", vmi.Namespace, vmi.Name, err)
	}
	api.NewDefaulter(context.Architecture.GetArchitecture()).SetObjectDefaults_Domain(domain)
	return &domain.Spec, nil
}

func domainXML(spec *api.DomainSpec) (string, error) {
	text, err := xml.MarshalIndent(spec, "", "\t")
	return string(text), err
}

func converterContext(vmi *v1.VirtualMachineInstance, host host) (*convertertypes.ConverterContext, error) {
	config, err := clusterConfig("")
	if err != nil {
		return nil, err
	}
	smbios := config.GetSMBIOS()
	context := &convertertypes.ConverterContext{
		Architecture:              arch.NewConverter(vmi.Spec.Architecture),
		VirtualMachine:            vmi,
		AllowEmulation:            *host.emulation,
		HypervisorDeviceAvailable: *host.kvm,
		EphemeraldiskCreator:      noDisks{},
		DisksInfo:                 map[string]*disk.DiskInfo{},
		MemBalloonStatsPeriod:     memoryStatsSeconds,
		FreePageReporting:         !vmi.IsHighPerformanceVMI(),
		SerialConsoleLog:          true,
		EFIConfiguration:          efiConfiguration(vmi),
		SMBios: &cmdv1.SMBios{
			Family:       smbios.Family,
			Product:      smbios.Product,
			Manufacturer: smbios.Manufacturer,
			Sku:          smbios.Sku,
			Version:      smbios.Version,
		},
	}
	for _, volume := range vmi.Spec.Volumes {
		if volume.ContainerDisk != nil {
			context.DisksInfo[volume.Name] = &disk.DiskInfo{Format: "qcow2"}
		}
	}
	if *host.cpuset != "" {
		if context.CPUSet, err = hardware.ParseCPUSetLine(*host.cpuset, maxCPUs); err != nil {
			return nil, fmt.Errorf("-cpuset %q: %w", *host.cpuset, err)
		}
	}
	if *host.topology != "" {
		context.Topology = &cmdv1.Topology{}
		if err := json.Unmarshal([]byte(*host.topology), context.Topology); err != nil {
			return nil, fmt.Errorf("-topology is not a KubeVirt topology: %w", err)
		}
	}
	// KubeVirt's converter dereferences both without a check.
	if vmi.IsCPUDedicated() && (context.CPUSet == nil || context.Topology == nil) {
		return nil, errors.New("a VMI with dedicatedCpuPlacement needs -cpuset and -topology")
	}
	return context, nil
}

// efiConfiguration names the firmware that KubeVirt's launcher image has.
func efiConfiguration(vmi *v1.VirtualMachineInstance) *convertertypes.EFIConfiguration {
	if !vmi.IsBootloaderEFI() {
		return nil
	}
	secure := vmi.Spec.Domain.Firmware.Bootloader.EFI.SecureBoot
	switch {
	case vmi.Spec.Architecture == "arm64":
		return &convertertypes.EFIConfiguration{
			EFICode: "/usr/share/AAVMF/AAVMF_CODE.fd",
			EFIVars: "/usr/share/AAVMF/AAVMF_VARS.fd",
		}
	case secure == nil || *secure:
		return &convertertypes.EFIConfiguration{
			EFICode:      "/usr/share/OVMF/OVMF_CODE.secboot.fd",
			EFIVars:      "/usr/share/OVMF/OVMF_VARS.secboot.fd",
			SecureLoader: true,
		}
	default:
		return &convertertypes.EFIConfiguration{
			EFICode: "/usr/share/OVMF/OVMF_CODE.secboot.fd",
			EFIVars: "/usr/share/OVMF/OVMF_VARS.fd",
		}
	}
}

// noDisks answers where disks would be and makes none.
type noDisks struct{}

var _ ephemeraldisk.EphemeralDiskCreatorInterface = noDisks{}

func (noDisks) CreateBackedImageForVolume(v1.Volume, string, string) error { return nil }

func (noDisks) CreateEphemeralImages(*v1.VirtualMachineInstance, *api.Domain) error { return nil }

func (noDisks) GetFilePath(volumeName string) string {
	return "/var/run/kubevirt-ephemeral-disks/disk-data/" + volumeName + "/disk.qcow2"
}

func (noDisks) Init() error { return nil }
