"""Makes another process run system calls, by ptrace(2), on x86-64 Linux.

The main thread of the process is stopped for some ten microseconds. Its registers are set to the
system call, one instruction runs, and the registers are restored, so that a call in which it waited
goes on. This needs permission to trace the process. Usually a user may trace descendants of the
calling process, or all of their processes if kernel.yama.ptrace_scope is 0. Root may trace all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from types import TracebackType

from ...errors import StrapIOError
from .proc_maps import mappings

__all__ = ["RemoteProcess", "system_call"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.syscall.restype = ctypes.c_long

_SINGLESTEP, _GETREGS, _SETREGS, _DETACH = 9, 12, 13, 17
_SEIZE, _INTERRUPT = 0x4206, 0x4207
_WALL = 0x40000000
_SYSCALL_INSTRUCTION = b"\x0f\x05"
_CODE_64 = 0x33  # the code segment of 64-bit programs
_PATIENCE_S = 2.0


class _Registers(ctypes.Structure):
    """struct user_regs_struct of sys/user.h."""

    _fields_ = [
        (name, ctypes.c_ulonglong)
        for name in (
            "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx",
            "rdx", "rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base",
            "gs_base", "ds", "es", "fs", "gs",
        )
    ]  # fmt: skip


def system_call(number: int, *arguments: int) -> int:
    """Runs a system call in this process and returns its result.

    Raises:
        OSError: the call failed.
    """
    result: int = _libc.syscall(
        ctypes.c_long(number), *(ctypes.c_ulong(value) for value in arguments)
    )
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


class RemoteProcess:
    """Another process, stopped during the ``with`` block. Use it from one thread.

    Entering the block raises ProcessLookupError if the process has ended. It raises StrapIOError if
    the process cannot be traced, is no 64-bit program, or does not stop in 2 s.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._saved = _Registers()
        self._at = 0
        self._signals: list[int] = []

    def __enter__(self) -> RemoteProcess:
        self._at = _syscall_instruction(self._pid)
        self._ptrace(_SEIZE, 0)
        try:
            self._ptrace(_INTERRUPT, 0)
            self._wait_stopped()
            self._ptrace(_GETREGS, ctypes.addressof(self._saved))
            if self._saved.cs != _CODE_64:
                raise StrapIOError(errno.ENOEXEC, f"process {self._pid} is no 64-bit program")
        except BaseException:
            self._detach()
            raise
        return self

    def call(self, number: int, *arguments: int) -> int:
        """Runs a system call in the process and returns its result.

        Raises:
            OSError: the call failed.
            ProcessLookupError: the process has ended.
        """
        registers = _Registers.from_buffer_copy(self._saved)
        registers.rip = self._at
        registers.rax = number
        registers.orig_rax = (1 << 64) - 1  # the kernel sees no interrupted call to restart
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
            setattr(registers, name, value)
        self._ptrace(_SETREGS, ctypes.addressof(registers))
        self._ptrace(_SINGLESTEP, 0)
        # If another signal stopped the process, keep the signal for later and step again.
        while (number := self._wait_stopped()) != signal.SIGTRAP:
            self._signals.append(number)
            self._ptrace(_SINGLESTEP, 0)
        self._ptrace(_GETREGS, ctypes.addressof(registers))
        result = ctypes.c_longlong(registers.rax).value
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._ptrace(_SETREGS, ctypes.addressof(self._saved))
        finally:
            self._detach()
        for number in self._signals:
            os.kill(self._pid, number)

    def _detach(self) -> None:
        if _libc.ptrace(_DETACH, self._pid, None, None) < 0 and ctypes.get_errno() != errno.ESRCH:
            raise self._failed("ptrace")

    def _ptrace(self, request: int, data: int) -> None:
        if _libc.ptrace(request, self._pid, None, data) < 0:
            raise self._failed("ptrace")

    def _failed(self, what: str) -> OSError:
        number = ctypes.get_errno()
        if number == errno.ESRCH:
            return ProcessLookupError(number, f"process {self._pid} has ended")
        return StrapIOError(number, f"{what} of process {self._pid}: {os.strerror(number)}")

    def _wait_stopped(self) -> int:
        """Waits until the process has stopped; returns the signal that stopped it."""
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            found, status = os.waitpid(self._pid, _WALL | os.WNOHANG)
            if found == 0:
                time.sleep(0.0002)
            elif os.WIFSTOPPED(status):
                return os.WSTOPSIG(status)
            else:
                raise ProcessLookupError(errno.ESRCH, f"process {self._pid} has ended")
        raise StrapIOError(
            errno.ETIMEDOUT,
            f"process {self._pid} did not stop in {_PATIENCE_S} s; it hangs in the kernel",
        )


def _syscall_instruction(pid: int) -> int:
    """The address of a syscall instruction in the vDSO, which every process has."""
    for one in mappings(pid):
        if one.name == "[vdso]":
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                code = os.pread(memory.fileno(), one.end - one.start, one.start)
            offset = code.find(_SYSCALL_INSTRUCTION)
            if offset >= 0:
                return one.start + offset
    raise StrapIOError(errno.ENOEXEC, f"process {pid} has no vDSO to call the kernel from")
