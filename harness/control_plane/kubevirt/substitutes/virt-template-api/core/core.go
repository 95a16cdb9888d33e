// Package core stands in for kubevirt.io/virt-template-api/core, a module that KubeVirt v1.9.0
// names and that the module proxy does not serve. It has what KubeVirt's code names and no more;
// nothing of it is reached unless the feature gates Template and OCIExport are both on.
package core

const (
	GroupName            = "template.kubevirt.io"
	SingularResourceName = "virtualmachinetemplate"
	PluralResourceName   = "virtualmachinetemplates"
)
