//! The page of NCCL's versions and functions, made from the list of entry points and from the tables of NVIDIA's releases.

use std::fmt::Write;

use nccl_sys::slots::{Description, ENTRIES, Role};
use windlass_base::gpu::library::{CUDA_MIN, DRIVER_MIN};

use super::{fresh, repository};

const PAGE: &str = "docs/compatibility.md";

/// Headings, each with the first of its functions, in the order of the list.
const HEADINGS: [(&str, &str); 10] = [
    ("ncclGetVersion", "The library"),
    ("ncclGetUniqueId", "Making and ending communicators"),
    ("ncclCommGetAsyncError", "Questions to a communicator"),
    ("ncclMemAlloc", "Memory, registration, windows"),
    ("ncclRedOpCreatePreMulSum", "Reductions of the program"),
    ("ncclAllReduce", "Collectives"),
    ("ncclSend", "Messages and one-sided calls"),
    ("ncclGroupStart", "Groups"),
    ("ncclParamBind", "Parameters"),
    ("ncclDevCommCreate", "Device interface, and names without a declaration"),
];

/// What Windlass does with each function that it handles, in the order of the list. `…Config` stands for all functions with that
/// ending.
const SEEN: &[(&str, &str)] = &[
    ("ncclGetLastError", "NCCL answers. After a refusal of Windlass it gives the text of that refusal."),
    (
        "ncclGetUniqueId",
        "NCCL makes the id, and Windlass adds a port and an id tag for peer groups. An id that nobody has used is given again.",
    ),
    (
        "ncclCommInitRank",
        "The ranks first try to make a peer group. NCCL makes the communicator, at once or, if it is lazy, later.",
    ),
    (
        "ncclCommInitRankConfig",
        "The same. With `blocking = 0` the ranks meet behind NCCL's init. With `launchOrderImplicit = 1` there is no peer group, and a configuration that Windlass does not know makes no lazy communicator.",
    ),
    ("ncclCommInitRankScalable", "The same. With more than one id the ranks meet after NCCL's init."),
    (
        "ncclCommInitAll",
        "NCCL makes the communicators, which then get a peer group without a session. They may be lazy.",
    ),
    (
        "ncclCommSplit",
        "The new ranks meet and may have a peer group, also those of a parent without one. Not in a group or with `blocking = 0`.",
    ),
    ("ncclCommShrink", "The same as a split."),
    ("ncclCommGetUniqueId", "NCCL makes the id. A lazy communicator is materialized first."),
    (
        "ncclCommGrow",
        "NCCL makes the communicator, without a peer group. A lazy parent is materialized first.",
    ),
    ("ncclCommFinalize", "Windlass ends what it has registered, then NCCL finalizes."),
    (
        "ncclCommDestroy",
        "Windlass ends its part. NCCL ends its own, or it is cached if the communicator was lazy.",
    ),
    ("ncclCommAbort", "Kernels of Windlass leave, and NCCL aborts its part. Any thread may call."),
    ("ncclCommRevoke", "NCCL revokes, and the peer group ends."),
    ("ncclCommGetAsyncError", "NCCL answers. Where it has no error, an error of the peer group is given."),
    ("ncclCommCount", "NCCL answers, or Windlass for a lazy communicator."),
    ("ncclCommCuDevice", "NCCL answers, or Windlass for a lazy communicator."),
    ("ncclCommUserRank", "NCCL answers, or Windlass for a lazy communicator."),
    (
        "ncclCommSuspend",
        "The communicator gives back Windlass's memory and its kept windows, with any NCCL; NCCL its own from 2.29.7 on. See [sleep](sleep.md).",
    ),
    ("ncclCommResume", "Both take their memory again, Windlass at the same addresses: graphs stay valid."),
    ("ncclCommMemStats", "Bytes of NCCL and of Windlass. A lazy communicator has Windlass's alone."),
    ("ncclMemAlloc", "A kept block of the same size, or a new one of NCCL's."),
    ("ncclMemFree", "The block is kept for a while, or NCCL frees it."),
    ("ncclCommRegister", "NCCL registers. Windlass then registers nothing by itself on this communicator."),
    ("ncclCommDeregister", "NCCL deregisters."),
    ("ncclCommWindowRegister", "A kept window, if all ranks have it, or a new one of NCCL's."),
    ("ncclCommWindowDeregister", "The window is kept, or NCCL ends it."),
    ("ncclWinGetUserPtr", "NCCL answers. A lazy communicator has no window yet."),
    (
        "ncclRedOpCreatePreMulSum",
        "NCCL makes the operation, or Windlass for a lazy communicator. Collectives with it run in NCCL.",
    ),
    ("ncclRedOpDestroy", "NCCL ends the operation, or Windlass for a lazy communicator."),
    ("ncclAllReduce", "Native up to a size, else NCCL."),
    ("ncclBroadcast", "Native up to a size, else NCCL. Several of a group may be one kernel."),
    ("ncclBcast", "The same as `ncclBroadcast`."),
    ("ncclReduce", "Native up to a size, else NCCL. Several of a group may be one kernel."),
    (
        "ncclAllGather",
        "Native up to a size. NCCL runs larger ones, over buffers that Windlass may have registered.",
    ),
    ("ncclReduceScatter", "Native up to a size, else NCCL."),
    ("ncclAlltoAll", "Kernels of Windlass, of any size."),
    ("ncclGather", "Kernels of Windlass, of any size."),
    ("ncclScatter", "Kernels of Windlass, of any size."),
    (
        "…Config",
        "With a configuration NCCL, in order with what Windlass runs. Without one as the plain call.",
    ),
    ("ncclSend", "Kernels of Windlass, of any size."),
    ("ncclRecv", "Kernels of Windlass, of any size."),
    ("ncclPutSignal", "NCCL, in order with what Windlass runs."),
    ("ncclSignal", "NCCL, in order with what Windlass runs."),
    ("ncclWaitSignal", "NCCL, in order with what Windlass runs."),
    ("ncclGroupStart", "NCCL opens a group, and so does Windlass."),
    (
        "ncclGroupEnd",
        "NCCL runs its part of the group, and Windlass its own in the order that all ranks have.",
    ),
    ("ncclGroupSimulateEnd", "NCCL estimates, without the part of Windlass."),
];

/// A role in words for users.
fn treatment(entry: &Description) -> &'static str {
    match entry.role {
        Role::Pass => "Passes unchanged.",
        Role::Handle => "Passes unchanged. A lazy communicator is materialized first.",
        Role::Seen => {
            // After the names, so that a sentence for `ncclCommInitRankConfig` itself comes first.
            let matches = |name: &str| match name.strip_prefix('…') {
                Some(end) => entry.name.ends_with(end),
                None => entry.name == name,
            };
            let row = SEEN.iter().find(|(name, _)| matches(name));
            row.unwrap_or_else(|| {
                panic!("tests/pages/compatibility.rs does not say what is done with {}", entry.name)
            })
            .1
        }
    }
}

/// `2.28.9` for 22809.
fn release(code: u32) -> String {
    format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100)
}

/// The releases that have a table in a folder of `abi/`, oldest first.
fn releases(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(repository().join("abi").join(folder)).unwrap();
    let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> =
        entries.filter_map(|entry| Some(name(entry.ok()?).strip_suffix(".txt")?.to_owned())).collect();
    let numbers =
        |release: &String| release.split('.').map(|part| part.parse::<u32>().unwrap()).collect::<Vec<_>>();
    names.sort_by_key(numbers);
    names
}

fn page() -> String {
    let exports = releases("exports");
    let (first, last) = (exports.first().unwrap(), exports.last().unwrap());
    let twins = ENTRIES.iter().filter(|entry| entry.twin.is_some()).count();
    let mut page = format!(
        "# Compatibility

This page is made from the list of entry points, `crates/nccl-sys/src/table.rs`.

## What was run

*By the names* means that nobody ran it: the functions that Windlass calls are there by the tables of NVIDIA's releases, and by the manual pages of Linux.

| | ran on GPUs | ran on the simulator or without GPUs | by the names |
|---|---|---|---|
| NCCL | 2.28.9; 2.30.7 (ranks that shared one H100); 2.28.3 (one program) | a simulated NCCL that says 2.18.6, 2.28.9, 2.29.7, 2.30.7 or 2.31.7 | {first} to {last}; older than 2.26.2: NCCL runs every call |
| driver | 580.159.04 | | {driver} and newer |
| CUDA of the driver | 13.0 | a simulated driver of 13.0 | {cuda} and newer |
| GPU | H100 80GB HBM3, H200; 1 to 4 of one host, joined by NVLink | 1 to 18 ranks | compute capability 8.0 and newer; code for 8.0 and 10.0 never ran |
| multicast (NVLS) | off in every measurement | on and off | |
| Linux | not recorded | not recorded | 3.17 and newer; 5.3 and newer for notice of dead ranks |
| distribution | not recorded | Debian 11 and 13 ([outputs](measurements/README.md#2026-11-25-fresh)) | glibc 2.17 and newer; not musl |
| Python | 3.12 | 3.9, 3.13 | 3.8 and newer |
| processor | x86-64 | x86-64 | none other |
| hosts | one | one; two network namespaces | several |

- **Driver {driver}** is the first of CUDA {cuda}, which has every function of the driver that Windlass calls. A test holds this of the list of functions. With an older driver NCCL runs every call, and `windlass doctor` says so.
- **Linux 3.17** has sealed memory without a name (`memfd_create`) and `getrandom`. Without `pidfd_open` (5.3), everything works but [the notice of dead ranks](troubleshooting.md#a-kernel-or-sandbox-without-pidfd_open).
- **NCCL 2.26.2** is the first release with peer groups. [What depends on the release](#versions-of-nccl) has the others.

## Versions of NCCL

Windlass takes the place of NCCL {first} to {last}. It loads whatever release the program would have used.

- **Names.** A test compares the exported names with those of {} releases (`abi/exports`).
- **Headers.** Constants and layouts were compared with the headers of {}.
- **Runs on GPUs.** NCCL 2.28.3 (one program), 2.28.9 and 2.30.7, on H100 and H200. Other releases were not run on GPUs.
- **A newer NCCL** may have functions that Windlass lacks. The loader does not find them in Windlass. `windlass run` refuses such a release, and `windlass doctor` says so.
- **An older NCCL** lacks functions of this list. They answer `ncclInvalidUsage`, as the log says once (`WINDLASS_LOG=warn`). `ncclGetVersion` gives the version of the real NCCL.

What depends on the release of NCCL:

| from | what |
|---|---|
| 2.26.2 | peer groups; with older releases NCCL runs all calls |
| 2.28 | registration of buffers, unless `WINDLASS_REGISTER` says otherwise |
| 2.28.3 | windows that are kept |
| 2.29.7 | the memory of cached communicators is told by NCCL, not measured |
| 2.30.7 | kernels of Windlass may start early, while the one before them runs |

## Programs

Every program that loads `libnccl.so.2` can run with Windlass. [Environments](environments.md) says what runs under the variables that vLLM, SGLang, Megatron-LM, DeepSpeed, torchtitan, verl, PyTorch and JAX set, and which of them were run on GPUs.
[NCCL's variables](nccl-variables.md) says what each variable changes, [symmetric memory](symmetric-memory.md#recipe) how to use windows from these programs.

Windlass runs on x86-64 Linux. [Troubleshooting](troubleshooting.md#the-preload-does-nothing) says which programs take no preload.

## Functions

The list has {} functions. {twins} of them have a second name (`pncclAllReduce` for `ncclAllReduce`), which does the same.

- **Passes unchanged** means that the call jumps into the real NCCL with all its arguments. Windlass counts it.
- What the tables say of a communicator holds for those with a [peer group](troubleshooting.md#why-is-my-communicator-on-nccl). On any other communicator NCCL runs the call, and Windlass counts it.
- **Native** is a kernel of Windlass for a collective. [Collectives](collectives.md#what-runs-where) has the sizes.
- A **lazy** communicator is one that NCCL has not built yet. It is **materialized** when a call needs NCCL's.
- *Since* is the first release on PyPI that has the function. {first} means that release or an earlier one.
",
        exports.len(),
        list(&releases("header")),
        ENTRIES.len(),
        driver = DRIVER_MIN,
        cuda = format!("{}.{}", CUDA_MIN / 1000, CUDA_MIN / 10 % 100),
    );
    for entry in ENTRIES {
        let has_about = !entry.about.is_empty();
        if let Some((_, heading)) = HEADINGS.iter().find(|(first, _)| *first == entry.name) {
            let (title, line) = if has_about { (" what it does |", "---|") } else { ("", "") };
            let head = format!("| function |{title} since | with Windlass |\n|---|{line}---|---|");
            writeln!(page, "\n### {heading}\n\n{head}").unwrap();
        }
        let about: Vec<&str> = entry.about.iter().map(|line| line.trim()).collect();
        let about = if has_about { format!(" {} |", about.join(" ")) } else { String::new() };
        let (since, treatment) = (release(entry.since), treatment(entry));
        writeln!(page, "| `{}` |{about} {since} | {treatment} |", entry.name).unwrap();
    }
    page
}

fn list(releases: &[String]) -> String {
    match releases {
        [others @ .., last] if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => releases.concat(),
    }
}

/// The page is up to date with the list.
#[test]
fn compatibility_is_fresh() {
    fresh(PAGE, &page());
}

/// Every sentence is about a function that Windlass handles, and every heading begins at one of the list.
#[test]
fn sentences_have_their_functions() {
    for (name, _) in SEEN.iter().filter(|(name, _)| !name.starts_with('…')) {
        let is_seen = |entry: &&Description| entry.name == *name && entry.role == Role::Seen;
        assert!(ENTRIES.iter().any(|entry| is_seen(&entry)), "{name} is not looked at");
    }
    for (first, heading) in HEADINGS {
        assert!(ENTRIES.iter().any(|entry| entry.name == first), "no {first} for {heading:?}");
    }
}
