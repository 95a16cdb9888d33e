package main

import (
	_ "kubevirt.io/kubevirt/pkg/virt-api/webhooks/mutating-webhook"
	_ "kubevirt.io/kubevirt/pkg/virt-api/webhooks/validating-webhook"
	_ "kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	_ "kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/rbac"
	_ "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	_ "k8s.io/client-go/tools/clientcmd"
	_ "kubevirt.io/client-go/kubecli"
)

func main() {}
