package main

import (
	"io"
	"maps"
	"os"
	"slices"
	"sync"
)

var (
	atEnd     []func()
	atEndLock sync.Mutex
)

// beforeEnd registers work that is done when standard input ends, before the process exits.
func beforeEnd(work func()) {
	atEndLock.Lock()
	defer atEndLock.Unlock()
	atEnd = append(atEnd, work)
}

// endWithStandardInput ends the process when standard input reaches end of file.
//
// No orderly shutdown: an orderly one takes kube-apiserver many seconds, and what these servers hold is thrown away.
func endWithStandardInput() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		atEndLock.Lock()
		for _, work := range atEnd {
			work()
		}
		os.Exit(0)
	}()
}

func names() []string {
	all := slices.Collect(maps.Keys(servers))
	all = slices.AppendSeq(all, maps.Keys(commands))
	slices.Sort(all)
	return all
}
