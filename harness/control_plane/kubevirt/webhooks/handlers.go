package main

import (
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/client-go/kubecli"

	netadmitter "kubevirt.io/kubevirt/pkg/network/admitter"
	"kubevirt.io/kubevirt/pkg/virt-api/webhooks"
	mutating "kubevirt.io/kubevirt/pkg/virt-api/webhooks/mutating-webhook"
	validating "kubevirt.io/kubevirt/pkg/virt-api/webhooks/validating-webhook"
	virtconfig "kubevirt.io/kubevirt/pkg/virt-config"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
)

// admission holds what virt-api gives its handlers.
type admission struct {
	config    *virtconfig.ClusterConfig
	client    kubecli.KubevirtClient
	informers *webhooks.Informers
	accounts  map[string]struct{}
}

// mux repeats virt-api's own table, which is not exported.
func (a admission) mux() *http.ServeMux {
	mux := http.NewServeMux()
	serve := func(path string, handler func(http.ResponseWriter, *http.Request)) { mux.HandleFunc(path, handler) }

	serve(components.VMMutatePath, func(w http.ResponseWriter, r *http.Request) {
		mutating.ServeVMs(w, r, a.config, a.client)
	})
	serve(components.VMIMutatePath, func(w http.ResponseWriter, r *http.Request) {
		mutating.ServeVMIs(w, r, a.config, a.informers, a.accounts)
	})
	serve(components.MigrationMutatePath, mutating.ServeMigrationCreate)
	serve(components.VMCloneCreateMutatePath, mutating.ServeClones)

	serve(components.VMICreateValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMICreate(w, r, a.config, a.accounts, networkValidator)
	})
	serve(components.VMIUpdateValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMIUpdate(w, r, a.config, a.accounts)
	})
	serve(components.VMValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMs(w, r, a.config, a.client, a.informers, a.accounts)
	})
	serve(components.VMIRSValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMIRS(w, r, a.config)
	})
	serve(components.VMPoolValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMPool(w, r, a.config, a.accounts)
	})
	serve(components.VMIPresetValidatePath, validating.ServeVMIPreset)
	serve(components.MigrationCreateValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeMigrationCreate(w, r, a.config, a.client, a.accounts)
	})
	serve(components.MigrationUpdateValidatePath, validating.ServeMigrationUpdate)
	serve(components.VMSnapshotValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMSnapshots(w, r, a.config, a.client)
	})
	serve(components.VMRestoreValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMRestores(w, r, a.config, a.client, a.informers)
	})
	serve(components.VMBackupValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMBackups(w, r, a.config, a.client, a.informers)
	})
	serve(components.VMBackupTrackerValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMBackupTrackers(w, r, a.config)
	})
	serve(components.VMExportValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVMExports(w, r, a.config)
	})
	serve(components.VMInstancetypeValidatePath, validating.ServeVmInstancetypes)
	serve(components.VMClusterInstancetypeValidatePath, validating.ServeVmClusterInstancetypes)
	serve(components.VMPreferenceValidatePath, validating.ServeVmPreferences)
	serve(components.VMClusterPreferenceValidatePath, validating.ServeVmClusterPreferences)
	serve(components.StatusValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeStatusValidation(w, r, a.config, a.client, a.informers, a.accounts)
	})
	serve(components.PodEvictionValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServePodEvictionInterceptor(w, r, a.config, a.client)
	})
	serve(components.MigrationPolicyCreateValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeMigrationPolicies(w, r, a.config)
	})
	serve(components.VMCloneCreateValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServeVirtualMachineClones(w, r, a.config, a.client)
	})
	serve(components.PluginValidatePath, func(w http.ResponseWriter, r *http.Request) {
		validating.ServePlugins(w, r, a.config)
	})
	return mux
}

func networkValidator(
	field *field.Path, spec *v1.VirtualMachineInstanceSpec, config *virtconfig.ClusterConfig,
) []metav1.StatusCause {
	return netadmitter.Validate(field, spec, config)
}
