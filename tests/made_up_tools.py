"""Stand-ins of CUDA's tools for a rehearsal: ``python made_up_tools.py NAME ARGUMENTS``.

Each runs the program that it is given, and prints what the real tool prints about it.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys

RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def program_of(arguments: list[str]) -> list[str]:
    """The program and its arguments, behind the options of the tool."""
    return arguments[arguments.index(sys.executable) :]


def ncu(arguments: list[str]) -> str:
    """A table of `ncu --csv --page raw --nvtx` with a kernel for each of the ten ranges."""
    from gpu.kernels import kernels

    metrics = arguments[arguments.index("--metrics") + 1].split(",")
    text = io.StringIO()
    text.write("==PROF== Connected to process 4242 (/usr/bin/python3.12)\n")
    for number in range(10):
        text.write(f'==PROF== Profiling "kernel" - {number}: 0%....50%....100% - 1 pass\n')
    text.write("==PROF== Disconnected from process 4242\n")
    table = csv.writer(text, quoting=csv.QUOTE_ALL)
    head = ["ID", "Process ID", "Process Name", "Host Name", RANGES, "Kernel Name", "Context"]
    table.writerow([*head, "Stream", "Block Size", "Grid Size", "Device", "CC", *metrics])
    table.writerow([""] * (len(head) + 5) + ["byte"] * len(metrics))
    for number, name in enumerate(kernels("cpu", True)):
        place = f' 4242  "<default domain>:{name}:none:none:none:none:none:none" '
        about = [str(number), "4242", "python3.12", "127.0.0.1", place, "kernel", "1", "7"]
        table.writerow(
            [*about, "(128, 1, 1)", "(4, 1, 1)", "0", "9.0", *["1,024.50"] * len(metrics)]
        )
    return text.getvalue()


def compute_sanitizer(arguments: list[str]) -> str:
    """The messages around a program in which nothing was found."""
    return "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def main() -> None:
    name, *arguments = sys.argv[1:]
    done = subprocess.run(program_of(arguments))
    print({"ncu": ncu, "compute-sanitizer": compute_sanitizer}[name](arguments), end="")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
