"""Reads an nccl.h: what it declares (names, from its preprocessed text) and what that is worth (values, sizes
and offsets, from a small C program that is compiled against it and run).

A table is a list of lines, each a kind, a name and what belongs to it:

    constant NCCL_MAJOR 2
    macro NCCL_VERSION                        a macro with arguments, or one that is no integer
    type ncclConfig_t size 56 align 8 kind struct
    type ncclComm_t size 8 align 8 kind pointer ncclComm
    field ncclConfig_t.magic offset 8 size 4
    initial ncclConfig_t.magic 3405691582     what the struct's initializer macro puts there
    function ncclResult_t ncclMemFree(void*)
"""

import os
import pathlib
import re
import subprocess
import tempfile

import cuda_stubs

COMPILER = os.environ.get("CC", "gcc")

# Types that come with an initializer macro.
INITIALIZERS = {
    "ncclConfig_t": "NCCL_CONFIG_INITIALIZER",
    "ncclCollConfig_t": "NCCL_COLLCONFIG_INITIALIZER",
    "ncclSimInfo_t": "NCCL_SIM_INFO_INITIALIZER",
    "ncclEncryptionConfig_t": "NCCL_ENCRYPTION_CONFIG_INITIALIZER",
}


def table(header):
    """The whole table of the file `header`, sorted by kind and name."""
    header = pathlib.Path(header).resolve()
    with tempfile.TemporaryDirectory(prefix="windlass-abi-") as scratch:
        scratch = pathlib.Path(scratch)
        compiler = Compiler(header, scratch)
        declared = Declarations(compiler.preprocessed())
        constants, macros = sort_macros(compiler, compiler.macros())
        lines = [f"macro {name}" for name in macros]
        lines += [f"function {prototype}" for prototype in declared.functions.values()]
        lines += compiler.run(probe_program(declared, constants, macros)).splitlines()
    return sorted(lines, key=lambda line: (line.split()[0], line))


class Compiler:
    """gcc with one header and the stub CUDA headers in its path."""

    def __init__(self, header, scratch):
        self.header, self.scratch = header, scratch
        stubs = cuda_stubs.write(scratch / "cuda")
        self.flags = ["-w", "-isystem", str(stubs), "-I", str(header.parent)]

    def include(self):
        return f'#include "{self.header}"\n'

    def gcc(self, arguments, source):
        return subprocess.run([COMPILER, "-x", "c", *self.flags, *arguments, "-"], input=source, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def preprocessed(self):
        """The header's own lines after preprocessing, without those of what it includes."""
        result = self.gcc(["-E"], self.include())
        if result.returncode:
            raise SystemExit(f"{self.header}: does not preprocess:\n{result.stderr}")
        kept, ours = [], False
        for line in result.stdout.splitlines():
            marker = re.match(r'# \d+ "(.*?)"', line)
            if marker:
                ours = os.path.realpath(marker.group(1)) == str(self.header)
            elif ours:
                kept.append(line)
        return "\n".join(kept)

    def macros(self):
        """Names that the header defines, without its include guard: name to "" or "(arguments)"."""
        text = self.header.read_text()
        found = {}
        define = r"^[ \t]*#[ \t]*define[ \t]+(p?nccl\w+|NCCL_\w+)(\([^)]*\))?(.*)$"
        for name, arguments, rest in re.findall(define, text, re.M):
            if rest.strip() or arguments:
                found[name] = arguments
        defined = set(re.findall(r"^#define (\w+)", self.gcc(["-E", "-dM"], self.include()).stdout, re.M))
        return {name: arguments for name, arguments in found.items() if name in defined}

    def compiles(self, source):
        return self.gcc(["-fsyntax-only"], self.include() + source).returncode == 0

    def run(self, source):
        program = self.scratch / "probe"
        built = self.gcc(["-std=gnu11", "-o", str(program)], source.replace("@HEADER@", self.include()))
        if built.returncode:
            raise SystemExit(f"{self.header}: the probe does not compile:\n{built.stderr}")
        return subprocess.run([str(program)], text=True, stdout=subprocess.PIPE, check=True).stdout


def sort_macros(compiler, macros):
    """Integer constants, and all others."""
    constants, others = [], []
    for name, arguments in macros.items():
        integer = not arguments and compiler.compiles(f"enum {{ probe = ({name}) }};\n")
        (constants if integer else others).append(name)
    return constants, others


class Declarations:
    """Types, enumeration constants, fields and functions that a preprocessed header declares."""

    def __init__(self, text):
        self.enumerators = []       # names
        self.types = {}             # name -> "enum", "struct", "pointer <struct tag>"
        self.fields = {}            # struct type -> field paths
        self.functions = {}         # name -> normalised prototype
        for declaration in declarations(text):
            self.read(declaration)

    def read(self, declaration):
        declaration = re.sub(r"__attribute__\s*\(\(.*?\)\)(?=\s|$|;)", " ", declaration, flags=re.S).strip()
        body = re.match(r"(typedef\s+)?(enum|struct|union)\s*(\w+)?\s*\{(.*)\}\s*(\w*)$", declaration, re.S)
        if body:
            _, kind, tag, inside, name = body.groups()
            if kind == "enum":
                self.enumerators += enumerators(inside)
            name = name or tag or ""
            if not name:
                return
            if name.endswith("_dummy_t"):
                return
            self.types[name] = kind
            if kind != "enum":
                self.fields[name] = fields(inside)
            return
        pointer = re.match(r"typedef\s+struct\s+(\w+)\s*\*\s*(\w+)$", declaration)
        if pointer:
            self.types[pointer.group(2)] = f"pointer {pointer.group(1)}"
            return
        alias = re.match(r"typedef\s+(struct|enum|union)?\s*(\w+)\s+(\w+)$", declaration)
        if alias and alias.group(3).startswith("nccl"):
            kind, target, name = alias.groups()
            self.types[name] = self.types.get(target, kind or "integer")
            if target in self.fields:
                self.fields[name] = self.fields[target]
            return
        function = re.match(r"(?:extern\s+)?([\w\s*]+?)\s*\b(p?nccl\w+)\s*\((.*)\)$", declaration, re.S)
        if function and not declaration.startswith("typedef"):
            result, name, arguments = function.groups()
            types = ", ".join(argument_type(argument) for argument in split(arguments))
            self.functions[name] = f"{type_name(result)} {name}({types or 'void'})"


def declarations(text):
    """The top-level declarations of a preprocessed header, without their semicolons."""
    text = re.sub(r'extern\s+"C"\s*\{', "", text)
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in "{(":
            depth += 1
        elif character in "})":
            depth -= 1
        elif character == ";" and depth == 0:
            yield " ".join(text[start:position].split())
            start = position + 1


def enumerators(inside):
    return [item.split("=")[0].strip() for item in inside.split(",") if item.strip()
            and not item.strip().startswith("ncclNumOps_dummy")]


def fields(inside, prefix=""):
    """Paths of all fields; those of an inner struct or union follow its own."""
    paths = []
    for member in declarations(inside):
        inner = re.match(r"(?:struct|union)\s*\w*\s*\{(.*)\}\s*(\w*)$", member, re.S)
        if inner:
            name = inner.group(2)
            if name:
                paths.append(prefix + name)
            paths += fields(inner.group(1), prefix + name + "." if name else prefix)
            continue
        for name in re.findall(r"(\w+)\s*(?:\[[^\]]*\])?\s*(?:,|$)", member):
            paths.append(prefix + name)
    return paths


def split(arguments):
    return [argument.strip() for argument in arguments.split(",") if argument.strip() not in ("", "void")]


def argument_type(argument):
    """The type of a parameter: its name and a const of the parameter itself are no part of a signature."""
    argument = re.sub(r"\[\s*\w*\s*\]\s*$", "", argument) + ("*" if argument.endswith("]") else "")
    words = re.findall(r"\w+|\*", argument)
    plain = [word for word in words if word not in ("const", "struct", "enum")]
    named = len([word for word in plain if word != "*"]) > 1 and plain != ["unsigned", "int"]
    if named and words[-1] != "*":
        words.pop()
    elif named and argument.endswith("*") and "[" in argument:
        words.remove(plain[-2])
    if "*" not in words:
        words = [word for word in words if word != "const"]
    return type_name(" ".join(words))


def type_name(text):
    words = [word for word in re.findall(r"\w+|\*", text) if word not in ("struct", "enum", "extern")]
    if words == ["unsigned"]:
        words.append("int")
    return re.sub(r"\s*\*", "*", " ".join(words))


def probe_program(declared, constants, macros):
    """A C program that prints a table line for everything that has a value, a size or an offset."""
    out = ["#include <stddef.h>", "#include <stdio.h>", "@HEADER@", "int main(void) {"]
    for name in dict.fromkeys(constants + declared.enumerators):
        out.append(f'  printf("constant {name} %lld\\n", (long long)({name}));')
    for name, kind in declared.types.items():
        out.append(f'  printf("type {name} size %zu align %zu kind {kind}\\n", sizeof({name}), _Alignof({name}));')
        for path in declared.fields.get(name, []):
            out.append(f'  printf("field {name}.{path} offset %zu size %zu\\n", offsetof({name}, {path}), '
                       f'sizeof((({name}*)0)->{path}));')
        if INITIALIZERS.get(name) in macros:
            out.append(f"  {{ {name} initial = {INITIALIZERS[name]};")
            for path in declared.fields.get(name, []):
                out.append(f'    printf("initial {name}.{path} %lld\\n", (long long)initial.{path});')
            out.append("  }")
    return "\n".join([*out, "  return 0;", "}", ""])
