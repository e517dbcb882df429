#!/usr/bin/env python3
"""Compares our nccl.h with the tables of NVIDIA's headers (header/VERSION.txt).

    compare.py OURS.h [VERSION...]

Every name, constant and prototype of every version must be in ours and be equal; fields must lie where they lay;
a structure is at least as large as it was, and exactly as large as in the newest version. What may differ is in
allowed.txt. Prints each difference; exit status 1 if there is one.

The checks are made by the compiler: one C program (and one C++ program for what only C++ sees) holds one check a
line, and the compiler's complaints are read back by line.
"""

import fnmatch
import pathlib
import re
import subprocess
import sys
import tempfile

import header

HERE = pathlib.Path(__file__).resolve().parent


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    ours = pathlib.Path(sys.argv[1]).resolve()
    versions = sys.argv[2:] or committed_versions()
    newest = committed_versions()[-1]
    allowed = read_allowed(HERE / "allowed.txt")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="windlass-abi-") as scratch:
        compiler = header.Compiler(ours, pathlib.Path(scratch))
        for version in versions:
            lines = (HERE / "header" / f"{version}.txt").read_text().splitlines()
            found = compare(compiler, lines, version == newest)
            excused = [line for line in found if is_allowed(line, allowed)]
            wrong = {line: message for line, message in found.items() if line not in excused}
            for line, message in wrong.items():
                print(f"{version}: {line}\n    ours: {message}")
            failed += len(wrong)
            print(f"{version}: {len(lines)} lines, {len(wrong)} wrong, {len(excused)} allowed to differ")
    sys.exit(1 if failed else 0)


def committed_versions():
    names = [path.stem for path in (HERE / "header").glob("*.txt")]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def read_allowed(path):
    rows = [line.split("|")[0].strip() for line in path.read_text().splitlines() if line.strip() and line[0] != "#"]
    return rows


def is_allowed(line, allowed):
    key = " ".join(line.split()[:2])
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in allowed)


def compare(compiler, lines, exact):
    """Lines of a table that do not hold for the compiler's header, each with what is seen instead."""
    wrong = complaints(compiler, lines, [c_check(line, exact) for line in lines], "c")
    wrong.update(complaints(compiler, lines, [cpp_check(line) for line in lines], "c++"))
    macros, missing = compiler.macros(), {line.split()[1] for line in wrong if line.startswith("field ")}
    initial = [line for line in lines if line.startswith("initial ")]
    present = [line for line in initial if initializer(line) in macros and line.split()[1] not in missing]
    wrong.update({line: "no such initializer or field" for line in initial if line not in present})
    wrong.update(wrong_initial_values(compiler, present))
    for line in wrong:
        if line.startswith("constant "):
            wrong[line] = seen_value(compiler, line.split()[1])
    return {line: wrong[line] for line in lines if line in wrong}


def c_check(line, exact):
    """One line of C that compiles only if the table's line holds."""
    kind, *words = line.split()
    if kind == "constant":
        value = "(-2147483647 - 1)" if words[1] == "-2147483648" else words[1]
        return f'_Static_assert(({words[0]}) == {value}, "another value");'
    if kind == "macro":
        return f"#ifndef {words[0]}\n#line @LINE@ \"table\"\n#error no such macro\n#endif"
    if kind == "type":
        name, size, align = words[0], words[2], words[4]
        relation = "==" if exact else ">="
        tests = f"sizeof({name}) {relation} {size} && _Alignof({name}) == {align}"
        if words[6] == "pointer":
            tests += f" && __builtin_types_compatible_p({name}, struct {words[7]}*)"
        return f'_Static_assert({tests}, "another size, alignment or target");'
    if kind == "field":
        name, path = words[0].split(".", 1)
        return (f"_Static_assert(__builtin_offsetof({name}, {path}) == {words[2]} "
                f'&& sizeof((({name}*)0)->{path}) == {words[4]}, "another offset or size");')
    if kind == "function":
        result, name, arguments = re.match(r"function (.*?)\s*\b(p?nccl\w+)\((.*)\)$", line).groups()
        return (f"_Static_assert(__builtin_types_compatible_p(__typeof__({name}), {result} ({arguments})), "
                '"another prototype");')
    return ""


def cpp_check(line):
    """One line of C++ that compiles only if the table's line holds: C++ programs carry type names in their symbols."""
    words = line.split()
    if words[0] != "type" or words[7] not in ("enum", "struct"):
        return ""
    trait = {"enum": "__is_enum", "struct": "__is_class"}[words[7]]
    return f'static_assert({trait}({words[1]}), "not of kind {words[7]}");'


def complaints(compiler, lines, checks, language):
    """The table's lines whose check the compiler refuses, with its words."""
    source = ["#include <stddef.h>", "#include <stdint.h>", compiler.include()]
    for number, check in enumerate(checks, 1):
        source.append(f'#line {number} "table"\n' + check.replace("@LINE@", str(number)))
    standard = "-std=gnu11" if language == "c" else "-std=gnu++17"
    command = [header.COMPILER, *compiler.flags, "-x", language, standard, "-fsyntax-only", "-fmax-errors=0", "-"]
    result = subprocess.run(command, input="\n".join(source) + "\n", text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)
    found = {}
    for number, message in re.findall(r"^table:(\d+):(?:\d+:)? error: (.*)$", result.stderr, re.M):
        found.setdefault(lines[int(number) - 1], message.replace("static assertion failed: ", "").strip('"'))
    if result.returncode and not found:
        raise SystemExit(f"{compiler.header}: does not compile as {language}:\n{result.stderr}")
    return found


def initializer(line):
    return header.INITIALIZERS.get(line.split()[1].split(".")[0])


def wrong_initial_values(compiler, lines):
    """The `initial` lines whose field our initializer macro sets to something else."""
    program = ["#include <stdio.h>", "@HEADER@", "int main(void) {"]
    for line in lines:
        name, path = line.split()[1].split(".", 1)
        program.append(f"  {{ {name} initial = {initializer(line)}; printf(\"%lld\\n\", (long long)initial.{path}); }}")
    values = compiler.run("\n".join([*program, "  return 0;", "}", ""])).split()
    return {line: value for line, value in zip(lines, values) if line.split()[2] != value}


def seen_value(compiler, name):
    program = f'#include <stdio.h>\n@HEADER@\nint main(void) {{ printf("%lld", (long long)({name})); return 0; }}\n'
    try:
        return compiler.run(program)
    except SystemExit:
        return "no such name"


if __name__ == "__main__":
    main()
