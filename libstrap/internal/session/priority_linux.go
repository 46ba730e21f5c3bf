// Lowers the priority of a thread, and tells its number, on Linux.

package session

import "syscall"

// lowerPriority lets the model's threads go first on a busy machine. Nice 19 is
// per thread on Linux; the caller has locked its goroutine to the thread. A
// refusal (a seccomp filter, say) costs speed only, so it is not an error.
func lowerPriority() {
	_ = syscall.Setpriority(syscall.PRIO_PROCESS, syscall.Gettid(), 19)
}

// threadID is the system's id of the thread, as in /proc/self/task.
func threadID() int { return syscall.Gettid() }
