// webhooks serves KubeVirt's own admission handlers over TLS on loopback, as virt-api would.
//
// Once it serves, the file named by -announce appears: a JSON list of the webhook configurations to
// create, with its URL and its CA in them. It ends when its standard input does.
package main

import (
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/flowcontrol"
	"kubevirt.io/client-go/kubecli"

	"kubevirt.io/kubevirt/pkg/certificates/triple"
	"kubevirt.io/kubevirt/pkg/certificates/triple/cert"
	"kubevirt.io/kubevirt/pkg/controller"
	"kubevirt.io/kubevirt/pkg/virt-api/webhooks"
	virtconfig "kubevirt.io/kubevirt/pkg/virt-config"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"

	"kvplace.io/tests/control-plane/kubevirt/lifeline"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "cluster and identity to use (required)")
	namespace := flag.String("namespace", "kubevirt", "where KubeVirt is installed")
	port := flag.Int("port", 0, "port on 127.0.0.1; 0: any free one")
	announcement := flag.String("announce", "", "file to write the configurations to (required)")
	flag.Parse()
	lifeline.Tie(func() { os.Exit(0) })
	if err := run(*kubeconfig, *namespace, *port, *announcement); err != nil {
		fmt.Fprintf(os.Stderr, "webhooks: %v\n", err)
		os.Exit(1)
	}
}

func run(kubeconfig, namespace string, port int, announcement string) error {
	mux, err := handlers(kubeconfig, namespace)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	certificate, authority, err := servingCertificate()
	if err != nil {
		return err
	}
	mutating := components.NewVirtAPIMutatingWebhookConfiguration(namespace)
	validating := components.NewVirtAPIValidatingWebhookConfiguration(namespace)
	target := loopback{mux: mux, url: "https://" + listener.Addr().String(), authority: authority}
	for i := range mutating.Webhooks {
		if err := target.redirect(&mutating.Webhooks[i].ClientConfig); err != nil {
			return err
		}
	}
	for i := range validating.Webhooks {
		if err := target.redirect(&validating.Webhooks[i].ClientConfig); err != nil {
			return err
		}
	}
	// The listener already takes connections, which wait for Serve below.
	if err := announce(announcement, []any{mutating, validating}); err != nil {
		return err
	}
	server := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: time.Minute,
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12},
	}
	return server.ServeTLS(listener, "", "")
}

// announce lets a file appear with its content complete.
func announce(path string, configurations []any) error {
	text, err := json.Marshal(configurations)
	if err != nil {
		return err
	}
	unfinished := path + ".unfinished"
	if err := os.WriteFile(unfinished, text, 0o600); err != nil {
		return err
	}
	return os.Rename(unfinished, path)
}

// handlers waits until the informers of the handlers have what the cluster has.
func handlers(kubeconfig, namespace string) (*http.ServeMux, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(virtconfig.DefaultVirtAPIQPS, virtconfig.DefaultVirtAPIBurst)
	client, err := kubecli.GetKubevirtClientFromRESTConfig(config)
	if err != nil {
		return nil, err
	}
	factory := controller.NewKubeInformerFactory(client.RestClient(), client, client, nil, namespace)
	kubeVirts, crds := factory.KubeVirt(), factory.CRD()
	informers := &webhooks.Informers{
		VMIPresetInformer:  factory.VirtualMachinePreset(),
		VMRestoreInformer:  factory.VirtualMachineRestore(),
		VMBackupInformer:   factory.VirtualMachineBackup(),
		DataSourceInformer: factory.DummyDataSource(),
		NamespaceInformer:  factory.Namespace(),
	}
	never := make(chan struct{})
	factory.Start(never)
	factory.WaitForCacheSync(never)
	clusterConfig, err := virtconfig.NewClusterConfig(crds, kubeVirts, namespace)
	if err != nil {
		return nil, err
	}
	admission := admission{
		config:    clusterConfig,
		client:    client,
		informers: informers,
		accounts:  webhooks.KubeVirtServiceAccounts(namespace),
	}
	return admission.mux(), nil
}

// loopback is where the API server reaches the handlers, in place of a service in the cluster.
type loopback struct {
	mux       *http.ServeMux
	url       string
	authority []byte
}

func (l loopback) redirect(client *admissionv1.WebhookClientConfig) error {
	path := *client.Service.Path
	request, err := http.NewRequest(http.MethodPost, l.url+path, strings.NewReader(""))
	if err != nil {
		return err
	}
	if _, pattern := l.mux.Handler(request); pattern == "" {
		return fmt.Errorf("KubeVirt registers %s, but there is no handler here", path)
	}
	url := l.url + path
	client.Service, client.URL, client.CABundle = nil, &url, l.authority
	return nil
}

func servingCertificate() (tls.Certificate, []byte, error) {
	const validity = 24 * time.Hour
	authority, err := triple.NewCA("kubevirt-admission-for-tests", validity)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	pair, err := triple.NewServerKeyPair(authority, "127.0.0.1", "virt-api", "kubevirt", "local", []string{"127.0.0.1"}, nil, validity)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	served, err := tls.X509KeyPair(cert.EncodeCertPEM(pair.Cert), cert.EncodePrivateKeyPEM(pair.Key))
	return served, cert.EncodeCertPEM(authority.Cert), err
}
