package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const lifetime = 30 * 24 * time.Hour

// runPKI is `pki FOLDER [NAME[=HOST,HOST...]]...`: it writes ca.crt, ca.key and service-account.key into FOLDER
// unless they are there, and for each NAME a pair NAME.crt, NAME.key signed by that CA.
//
// Every pair serves and authenticates alike: the common name is NAME, the hosts are 127.0.0.1, localhost and those
// given.
func runPKI() int {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: pki FOLDER [NAME[=HOST,HOST...]]...")
		return 2
	}
	folder := os.Args[1]
	authority, err := openAuthority(folder)
	if err != nil {
		fmt.Fprintln(os.Stderr, "pki:", err)
		return 1
	}
	for _, wanted := range os.Args[2:] {
		name, hosts, _ := strings.Cut(wanted, "=")
		if err := authority.issue(folder, name, strings.FieldsFunc(hosts, func(r rune) bool { return r == ',' })); err != nil {
			fmt.Fprintf(os.Stderr, "pki: %s: %v\n", name, err)
			return 1
		}
	}
	return 0
}

type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func openAuthority(folder string) (*authority, error) {
	certificatePEM, err := os.ReadFile(filepath.Join(folder, "ca.crt"))
	if errors.Is(err, fs.ErrNotExist) {
		return createAuthority(folder)
	}
	if err != nil {
		return nil, err
	}
	keyPEM, err := os.ReadFile(filepath.Join(folder, "ca.key"))
	if err != nil {
		return nil, err
	}
	certificateBlock, _ := pem.Decode(certificatePEM)
	keyBlock, _ := pem.Decode(keyPEM)
	if certificateBlock == nil || keyBlock == nil {
		return nil, fmt.Errorf("%s: ca.crt or ca.key is not PEM", folder)
	}
	certificate, err := x509.ParseCertificate(certificateBlock.Bytes)
	if err != nil {
		return nil, err
	}
	key, err := x509.ParseECPrivateKey(keyBlock.Bytes)
	if err != nil {
		return nil, err
	}
	return &authority{certificate, key}, nil
}

func createAuthority(folder string) (*authority, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template, err := newCertificate("kvplace tests CA")
	if err != nil {
		return nil, err
	}
	template.IsCA = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	// kube-apiserver signs service account tokens with RSA or ECDSA; clients in the field meet RSA.
	signer, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	return &authority{certificate, key}, errors.Join(
		writePEM(folder, "service-account.key", "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(signer)),
		writeKey(folder, "ca.key", key),
		writePEM(folder, "ca.crt", "CERTIFICATE", der),
	)
}

func (a *authority) issue(folder, name string, hosts []string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template, err := newCertificate(name)
	if err != nil {
		return err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	for _, host := range append([]string{"127.0.0.1", "localhost"}, hosts...) {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		return err
	}
	return errors.Join(writeKey(folder, name+".key", key), writePEM(folder, name+".crt", "CERTIFICATE", der))
}

func newCertificate(commonName string) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: commonName},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(lifetime),
		BasicConstraintsValid: true,
	}, nil
}

func writeKey(folder, file string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(folder, file, "EC PRIVATE KEY", der)
}

func writePEM(folder, file, kind string, der []byte) error {
	return os.WriteFile(filepath.Join(folder, file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
