"""Where untrusted programs run: a process of their own without files, network, children or signals. Linux only.

`lockdown` takes rights away from the calling process, for good: root and capabilities (`privileges`), files
(`landlock`), all system calls but a list (`syscalls`). `serve` is the program that runs cases, each in a fork that is
locked down. They import nothing but the standard library, for the interpreter of the jail has nothing else.
"""
