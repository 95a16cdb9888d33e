// Package virttemplate stands in for kubevirt.io/virt-template-client-go, a module that KubeVirt
// v1.9.0 names and that the module proxy does not serve. It makes no client: KubeVirt asks for
// one only with the feature gates Template and OCIExport, and then stops with the error below.
package virttemplate

import (
	"errors"

	"k8s.io/client-go/rest"
)

type TemplateV1beta1Interface interface {
	RESTClient() rest.Interface
}

type Clientset struct{}

func NewForConfig(*rest.Config) (*Clientset, error) {
	return nil, errors.New("the test control plane has no VirtualMachineTemplate client: " +
		"leave the feature gates Template and OCIExport off")
}

// TemplateV1beta1 cannot be reached, because NewForConfig hands out no Clientset.
func (*Clientset) TemplateV1beta1() TemplateV1beta1Interface {
	panic("the test control plane has no VirtualMachineTemplate client")
}
