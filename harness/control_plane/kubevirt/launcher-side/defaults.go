package main

import (
	"encoding/json"
	"fmt"

	extv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	v1 "kubevirt.io/api/core/v1"

	"kubevirt.io/kubevirt/pkg/defaults"
	"kubevirt.io/kubevirt/pkg/util"
	virtconfig "kubevirt.io/kubevirt/pkg/virt-config"
)

const kubeVirtName = "kubevirt"

// clusterConfig is KubeVirt's view of its configuration without a cluster: an informer that is
// never started; its store already holds the KubeVirt CR.
func clusterConfig(configuration string) (*virtconfig.ClusterConfig, error) {
	kubeVirt := &v1.KubeVirt{
		ObjectMeta: metav1.ObjectMeta{Name: kubeVirtName, Namespace: kubeVirtName, ResourceVersion: "1"},
		Status:     v1.KubeVirtStatus{Phase: v1.KubeVirtPhaseDeployed, DefaultArchitecture: "amd64"},
	}
	if configuration != "" {
		if err := json.Unmarshal([]byte(configuration), &kubeVirt.Spec.Configuration); err != nil {
			return nil, fmt.Errorf("-configuration is not a KubeVirt configuration: %w", err)
		}
	}
	kubeVirts := cache.NewSharedIndexInformer(&cache.ListWatch{}, &v1.KubeVirt{}, 0, cache.Indexers{})
	crds := cache.NewSharedIndexInformer(&cache.ListWatch{}, &extv1.CustomResourceDefinition{}, 0, cache.Indexers{})
	if err := kubeVirts.GetStore().Add(kubeVirt); err != nil {
		return nil, err
	}
	return virtconfig.NewClusterConfigWithCPUArch(crds, kubeVirts, kubeVirtName, "amd64")
}

// applyDefaults does to a new VMI what KubeVirt's mutating webhook does. The webhook's own
// function cannot be linked here: its package takes seconds and a gigabyte to initialise.
func applyDefaults(config *virtconfig.ClusterConfig, vmi *v1.VirtualMachineInstance) error {
	if err := defaults.SetDefaultVirtualMachineInstance(config, vmi); err != nil {
		return err
	}
	_, versioned := vmi.Annotations[v1.PciTopologyVersionAnnotation]
	if !versioned && defaults.SupportsPCIeHotplug(&vmi.Spec) {
		metav1.SetMetaDataAnnotation(&vmi.ObjectMeta, v1.PciTopologyVersionAnnotation, v1.PciTopologyVersionV3)
	}
	if !config.RootEnabled() {
		vmi.Status.RuntimeUser = util.NonRootUID
	}
	return nil
}
