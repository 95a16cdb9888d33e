// Package lifeline ties a program to the one that started it: the process that holds the other end of its
// standard input keeps it alive, and even a starter that is killed lets go of it.
package lifeline

import (
	"io"
	"os"
)

// Tie calls end once standard input has reached its end.
func Tie(end func()) {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		end()
	}()
}
