package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/kubevirt/pkg/hooks"
)

// insideNamespace is the command that this program runs itself as, in a mount namespace of its own.
const insideNamespace = "call-hook-inside"

// runInsideNamespace runs this program again where mounts are its own, so that any folder can
// stand in for the constant path of KubeVirt's hooks, in parallel and without root.
func runInsideNamespace(args []string) error {
	err := startInside(args, unix.CLONE_NEWNS)
	if errors.Is(err, unix.EPERM) {
		err = startInside(args, unix.CLONE_NEWNS|unix.CLONE_NEWUSER)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		os.Exit(max(1, exit.ExitCode()))
	}
	if err != nil {
		return fmt.Errorf("cannot enter a mount namespace (root, or user namespaces, are needed): %w", err)
	}
	return nil
}

func startInside(args []string, flags uintptr) error {
	command := exec.Command("/proc/self/exe", append([]string{insideNamespace}, args...)...)
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: syscall.SIGKILL}
	if flags&unix.CLONE_NEWUSER != 0 {
		command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	return command.Run()
}

// mountSockets makes folder appear at the path where KubeVirt's client searches for sockets.
func mountSockets(folder string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making / private: %w", err)
	}
	// Opened in this namespace: a descriptor from the parent's could not be bound here. And before
	// the tmpfs, which would hide a folder below /run.
	descriptor, err := unix.Open(folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("the folder of sockets %s: %w", folder, err)
	}
	run, err := filepath.EvalSymlinks(filepath.Dir(hooks.HookSocketsSharedDirectory))
	if err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", run, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=64k"); err != nil {
		return fmt.Errorf("mounting a tmpfs on %s: %w", run, err)
	}
	if err := os.Mkdir(hooks.HookSocketsSharedDirectory, 0o755); err != nil {
		return err
	}
	source := "/proc/self/fd/" + strconv.Itoa(descriptor)
	if err := unix.Mount(source, hooks.HookSocketsSharedDirectory, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("binding %s on %s: %w", folder, hooks.HookSocketsSharedDirectory, err)
	}
	return nil
}
