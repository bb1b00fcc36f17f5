"""The command line: one file a command, what people see, and what `--model` means.

In: arguments. Out: text or JSON, files, and an exit code that scripts rely on.
"""
