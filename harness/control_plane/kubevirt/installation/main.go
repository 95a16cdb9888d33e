// installation prints, as JSON, what virt-operator would have put into a cluster before KubeVirt's
// own processes start there: custom resource definitions, service accounts, roles and bindings.
//
// It is a program of its own because the one with the admission handlers takes seconds to start.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"

	extv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/rbac"
)

func main() {
	namespace := flag.String("namespace", "kubevirt", "where KubeVirt is installed")
	flag.Parse()
	crds, err := definitions()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(map[string]any{"crds": crds, "rbac": accessRules(*namespace)})
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "installation: %v\n", err)
		os.Exit(1)
	}
}

func definitions() ([]*extv1.CustomResourceDefinition, error) {
	var crds []*extv1.CustomResourceDefinition
	for _, make := range []func() (*extv1.CustomResourceDefinition, error){
		components.NewKubeVirtCrd,
		components.NewVirtualMachineCrd,
		components.NewVirtualMachineInstanceCrd,
		components.NewPresetCrd,
		components.NewReplicaSetCrd,
		components.NewVirtualMachineInstanceMigrationCrd,
		components.NewVirtualMachinePoolCrd,
		components.NewVirtualMachineSnapshotCrd,
		components.NewVirtualMachineSnapshotContentCrd,
		components.NewVirtualMachineRestoreCrd,
		components.NewVirtualMachineExportCrd,
		components.NewVirtualMachineBackupCrd,
		components.NewVirtualMachineBackupTrackerCrd,
		components.NewVirtualMachineCloneCrd,
		components.NewVirtualMachineInstancetypeCrd,
		components.NewVirtualMachineClusterInstancetypeCrd,
		components.NewVirtualMachinePreferenceCrd,
		components.NewVirtualMachineClusterPreferenceCrd,
		components.NewMigrationPolicyCrd,
		components.NewPluginCrd,
	} {
		crd, err := make()
		if err != nil {
			return nil, err
		}
		crds = append(crds, crd)
	}
	return crds, nil
}

func accessRules(namespace string) []runtime.Object {
	const networkAttachments = false
	objects := rbac.GetAllCluster()
	objects = append(objects, rbac.GetAllApiServer(namespace)...)
	objects = append(objects, rbac.GetAllHandler(namespace)...)
	return append(objects, rbac.GetAllController(namespace, networkAttachments)...)
}
