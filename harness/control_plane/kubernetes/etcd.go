package main

import (
	"flag"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

// runEtcd serves one etcd member on a unix socket, so that it needs no port and no other program can reach it.
//
// Nothing is synced to disk: the data is worth nothing after the test run.
func runEtcd() int {
	flags := flag.NewFlagSet("etcd", flag.ExitOnError)
	data := flags.String("data-dir", "", "folder of the database")
	socket := flags.String("socket", "", "unix socket to serve clients on; at most 100 characters")
	scratch := flags.String("remove-at-end", "", "folder to remove when standard input ends")
	_ = flags.Parse(os.Args[1:])
	if *data == "" || *socket == "" {
		fmt.Fprintln(os.Stderr, "etcd: -data-dir and -socket are needed")
		return 2
	}
	if len(*socket) > 100 {
		fmt.Fprintf(os.Stderr, "etcd: -socket %s is longer than 100 characters, the kernel's limit is close\n", *socket)
		return 2
	}
	if *scratch != "" {
		beforeEnd(func() { removeStubbornly(*scratch) })
	}

	// Both are advertised to members that do not exist; etcd insists on host:port for them.
	advertised := url.URL{Scheme: "http", Host: "127.0.0.1:2380"}
	config := embed.NewConfig()
	config.Name = "tests"
	config.Dir = *data
	config.ListenClientUrls = []url.URL{{Scheme: "unix", Host: *socket}}
	config.ListenPeerUrls = []url.URL{{Scheme: "unix", Host: filepath.Join(filepath.Dir(*socket), "peer.sock")}}
	config.AdvertiseClientUrls = []url.URL{advertised}
	config.AdvertisePeerUrls = []url.URL{advertised}
	config.InitialCluster = config.Name + "=" + advertised.String()
	config.UnsafeNoFsync = true
	config.LogLevel = "warn"
	config.QuotaBackendBytes = 4 << 30
	// Left at its zero value, every single request is logged as slow.
	config.WarningUnaryRequestDuration = time.Second

	server, err := embed.StartEtcd(config)
	if err != nil {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		return 1
	}
	fmt.Fprintln(os.Stderr, "etcd: ends with its standard input")
	select {
	case err = <-server.Err():
	case <-server.Server.StopNotify():
	}
	fmt.Fprintln(os.Stderr, "etcd: stopped:", err)
	return 1
}

// removeStubbornly removes a folder although others may still be writing into it for a moment.
func removeStubbornly(folder string) {
	for range 20 {
		if os.RemoveAll(folder) == nil {
			if _, err := os.Lstat(folder); os.IsNotExist(err) {
				return
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}
