//! The one table of options. `docs/options.md` is made from it.

/// A row of the table.
#[derive(Debug)]
pub struct Description {
    /// The variable.
    pub name: &'static str,
    /// What it takes.
    pub values: &'static str,
    /// What holds when it is not set.
    pub default: &'static str,
    /// One sentence.
    pub about: &'static str,
}

/// Every variable that Windlass reads.
pub const OPTIONS: &[Description] = &[
    Description {
        name: "WINDLASS",
        values: "on, off",
        default: "on",
        about: "The kill switch: off sends every call straight to the real NCCL, unseen and uncounted.",
    },
    Description {
        name: "WINDLASS_NCCL",
        values: "path",
        default: "searched for",
        about: "The real libnccl.so.2, or the folder that holds it. If it cannot be used, no other is tried.",
    },
    Description {
        name: "WINDLASS_LOG",
        values: "off, error, warn, info, debug, trace",
        default: "error",
        about: "How much is logged, as lines like NCCL's. Errors are only what makes calls fail.",
    },
    Description {
        name: "WINDLASS_LOG_FILE",
        values: "path",
        default: "standard error",
        about: "Where log lines go; %h becomes the host's name and %p the process id.",
    },
    Description {
        name: "WINDLASS_REPORT",
        values: "text, json, text:path, json:path",
        default: "none",
        about: "Prints what was counted when a process that asked for a communicator exits, to standard error or a file; %h and %p as above.",
    },
    Description {
        name: "WINDLASS_STATS",
        values: "on, off",
        default: "on",
        about: "Whether the counters lie in shared memory (under 1 MiB in /dev/shm), where `windlass stats` reads them.",
    },
    Description {
        name: "WINDLASS_FABRIC",
        values: "on, off",
        default: "on",
        about: "Whether the ranks of a new communicator within one host meet, agree and map each other's memory when it is made. Its sends, receives, all-to-alls, gathers and scatters then run over that memory, without connections of NCCL.",
    },
    Description {
        name: "WINDLASS_LAZY",
        values: "pairs, all, off",
        default: "pairs",
        about: "Which communicators within a fabric are promises: NCCL's own is built when a call needs it that all ranks make. pairs are those of two ranks.",
    },
    Description {
        name: "WINDLASS_WARM",
        values: "on, off",
        default: "on",
        about: "Whether, in each process, the first communicator with a fabric on a device is NCCL's own and no promise, over which the rank then sends itself a byte: NCCL's first kernels on a device wait until nothing runs there, so for a receive of ours that waits. off saves that time and memory, but a first collective beside a receive that waits may then hang: only for programs in which that cannot be.",
    },
    Description {
        name: "WINDLASS_PARK",
        values: "bytes, with K, M, G or T for powers of 1024; 0 for none",
        default: "1G",
        about: "How much device memory NCCL's communicators of promises that have ended may keep in this process (at most 16 of them), to be used again by new ones of the same ranks, devices and configuration that ncclCommInitRank and its variants make. What nobody uses for 5 seconds ends, and all where device memory is short: at once if no communicator of the process is alive, else at the next init or destroy.",
    },
    Description {
        name: "WINDLASS_MEETINGS_MAX",
        values: "number",
        default: "1024",
        about: "Ids made by this process whose ranks can still meet, each with a listening socket; communicators of further ids are NCCL's alone.",
    },
    Description {
        name: "WINDLASS_NVTX",
        values: "on, off",
        default: "off",
        about: "NVTX ranges around calls; needs a build with the feature `nvtx`.",
    },
    Description {
        name: "WINDLASS_ARENA_MAX",
        values: "bytes, with K, M, G or T for powers of 1024",
        default: "8G",
        about: "How much device memory of its own (rings and counters of communicators) Windlass may have on each device in this process; it takes what communicators need, in steps, and gives it back. Each takes 23, 51 or 76 MiB for 2, 4 or 8 ranks, and more when its rings grow. A communicator for which that is not enough is left to NCCL.",
    },
    Description {
        name: "WINDLASS_POOL",
        values: "off, bytes, with K, M, G or T for powers of 1024",
        default: "2G",
        about: "How much memory of ncclMemAlloc that the program has freed is kept on each device, to be handed out again, for two seconds; from the first communicator with a fabric on, and never more than an eighth of what is free. It goes back when memory is short. off keeps nothing.",
    },
    Description {
        name: "WINDLASS_REGISTER",
        values: "auto, on, off",
        default: "auto",
        about: "Whether the buffers of large all-gathers within a fabric are registered with NCCL where that is safe. auto: where it was measured to profit (compute capability 9.0, no multicast, NCCL 2.28 and later); on: everywhere, since NCCL 2.19.3.",
    },
    Description {
        name: "WINDLASS_FAST",
        values: "auto, off",
        default: "auto",
        about: "Whether kernels of ours run the small and middle collectives of a fabric of at most 8 ranks, on any pointers. auto: up to the sizes to which they were measured to be faster than NCCL's, 16 KiB where nobody measured; never where NCCL_ALGO, NCCL_PROTO or a CTA policy is set. All ranks must say the same, or none has them.",
    },
    Description {
        name: "WINDLASS_BATCH",
        values: "all, small, off",
        default: "all",
        about: "Which collectives of a group, of those within their limits for `WINDLASS_FAST`, one kernel of ours runs together. all: those of at most 8 MiB each, of one kind and reduction at most 8 MiB together (2 ranks: all-reduces 32, reduce-scatters 48, all-gathers 128), where more than 16 KiB are within its limit. small: those of at most 64 KiB (all-gathers and reduce-scatters 128), 512 units of 256 bytes a kernel, counted from each rank to each other. off: none. What no kernel runs together is ours up to two kernels of a group, from 1 MiB on four, and NCCL's where there would be more. The most cautious rank's holds.",
    },
    Description {
        name: "WINDLASS_TUNING",
        values: "path",
        default: "the built-in table",
        about: "A table that `windlass tune` wrote: up to which sizes kernels of ours run which collectives. What it does not say is as the built-in table has it. All ranks must have the same, or the built-in one holds on all of them; one that cannot be read is none.",
    },
    Description {
        name: "WINDLASS_STAGING_MAX",
        values: "bytes, with K, M, G or T for powers of 1024",
        default: "512M",
        about: "How much device memory a communicator may hold to stand for buffers that cannot be registered in a call whose other ranks' are; larger calls are never registered.",
    },
    Description {
        name: "WINDLASS_WINDOWS",
        values: "keep, off",
        default: "keep",
        about: "Whether windows over memory of `ncclMemAlloc` stay when they are deregistered, to be found again by ncclCommWindowRegister. keep: in a fabric without multicast (NCCL's NVLS), from NCCL 2.28.3 on, where WINDLASS_POOL is not off; not where NCCL_ALGO, NCCL_PROTO or a CTA policy is set, or NCCL_WIN_ENABLE=0. The most cautious rank's holds.",
    },
    Description {
        name: "WINDLASS_CHECK",
        values: "on, off",
        default: "off",
        about: "Whether ranks of a fabric tell each other what they call, and a warning names the rank whose collective or window registration differs, or that has not come for 10 seconds. For finding faults: calls take longer. All ranks must say so, or it is off. Raises WINDLASS_LOG to warn where that is not set.",
    },
    Description {
        name: "WINDLASS_STUCK_AFTER",
        values: "seconds",
        default: "60",
        about: "How long what runs here and does not move, a send, receive or collective, or a registration of a window, waits for a rank whose process is dead, before it is given up: the communicator gets an asynchronous error, the registration ncclRemoteError.",
    },
    Description {
        name: "WINDLASS_LIBRARY",
        values: "path",
        default: "beside the command",
        about: "The libwindlass.so that the `windlass` command uses; read by the command only.",
    },
];
