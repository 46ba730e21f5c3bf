// Package bpf holds the programs that libstrap runs in the kernel, as objects ready to load.
// block.bpf.c follows requests to block devices. tasks.bpf.c reads what the kernel has counted for
// each thread: page faults, core time, switches. process.bpf.c only finds the process with a number;
// syscalls.bpf.c follows its system calls, and offcpu.bpf.c its threads' waits for a core. The objects
// are CO-RE: one build runs on every little-endian machine whose kernel has BTF.
//
// go generate needs Debian's clang-14, llvm-14 and libbpf-dev.
package bpf

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types -type request_counts -type loss_counts -type device_entry -type request_entry -type ended_entry -cflags "-O2 -mcpu=v3 -Wall -Wextra -Werror" Block block.bpf.c
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types -cflags "-O2 -mcpu=v3 -Wall -Wextra -Werror -DRAW" BlockRaw block.bpf.c
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types -type task_record -cflags "-O2 -mcpu=v3 -Wall -Wextra -Werror" Tasks tasks.bpf.c
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types -type process_record -cflags "-O2 -mcpu=v3 -Wall -Wextra -Werror" Process process.bpf.c
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types -type syscall_counts -type inflight_record -cflags "-O2 -mcpu=v3 -Wall -Wextra -Werror" Syscalls syscalls.bpf.c
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types -type wait_counts -type wait_record -type stack_key -type stack_counts -cflags "-O2 -mcpu=v3 -Wall -Wextra -Werror" OffCPU offcpu.bpf.c
