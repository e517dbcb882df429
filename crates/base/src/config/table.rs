//! The one table of options. A row says all of an option: the names, the field, its type, its default and its parser, and for people the
//! values, the default and one sentence. `Startup`, `Config`, what is read from the environment, and `docs/options.md` come from it.
//! A new option is a new row.

use std::path::PathBuf;
use std::time::Duration;

use super::values::{
    batch, bytes, bytes_or_none, collectives, lazy, level, number, path, pool, register, report, seconds,
    switch, windows,
};
use super::{Batch, Collectives, Lazy, Register, Report, Switch, Windows};

/// What people read of an option.
#[derive(Debug)]
pub struct Description {
    /// The variable.
    pub name: &'static str,
    /// Its name in earlier versions, which is still read.
    pub was: Option<&'static str>,
    /// What it takes.
    pub values: &'static str,
    /// What holds when it is not set.
    pub default: &'static str,
    /// One sentence.
    pub about: &'static str,
}

/// The old name, where there is one.
macro_rules! earlier {
    () => {
        None
    };
    ($name:literal) => {
        Some($name)
    };
}

/// A struct with a field a row, and the rows' descriptions.
macro_rules! options {
    (
        $(#[$about:meta])*
        pub struct $struct:ident, $descriptions:ident {
            $($name:literal $(was $was:literal)? => $field:ident: $type:ty = $value:expr, by $parser:ident; $values:literal, $default:literal, $sentence:literal;)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $struct {
            $(#[doc = $sentence] pub $field: $type,)*
        }

        impl Default for $struct {
            fn default() -> $struct {
                $struct { $($field: $value,)* }
            }
        }

        impl $struct {
            /// Takes the value of the option `name`; says whether it is one, and whether `text` can be read.
            pub(super) fn take(&mut self, name: &str, text: &str) -> Option<Result<(), ()>> {
                match name {
                    $($name => Some($parser(text).map(|value| self.$field = value).ok_or(())),)*
                    _ => None,
                }
            }
        }

        const $descriptions: &[Description] = &[
            $(Description { name: $name, was: earlier!($($was)?), values: $values, default: $default, about: $sentence },)*
        ];
    };
}

options! {
    /// What the environment says of loading, logging and counting, at the first call of all.
    pub struct Startup, OF_STARTUP {
        "WINDLASS" => windlass: Switch = Switch::On, by switch;
        "on, off", "on",
        "The kill switch: off sends every call straight to the real NCCL, unseen and uncounted.";

        "WINDLASS_LOG" => log: ::log::LevelFilter = ::log::LevelFilter::Error, by level;
        "off, error, warn, info, debug, trace", "error",
        "How much is logged, as lines like NCCL's. Errors are only what makes calls fail.";

        "WINDLASS_LOG_FILE" => log_file: Option<PathBuf> = None, by path;
        "path", "standard error",
        "Where log lines go; %h becomes the host's name and %p the process id.";

        "WINDLASS_REPORT" => report: Option<Report> = None, by report;
        "text, json, text:path, json:path", "none",
        "Prints what was counted when a process that asked for a communicator exits, to standard error or a file; %h and %p as above.";

        "WINDLASS_STATS" => stats: Switch = Switch::On, by switch;
        "on, off", "on",
        "Whether the counters lie in shared memory (under 1 MiB in /dev/shm), where `windlass stats` reads them.";

        "WINDLASS_NVTX" => nvtx: Switch = Switch::Off, by switch;
        "on, off", "off",
        "NVTX ranges around calls; needs a build with the feature `nvtx`.";
    }
}

options! {
    /// What the environment says of everything else, at the first id, init or `ncclMemAlloc`.
    pub struct Config, OF_CONFIG {
        "WINDLASS_PEER_GROUPS" was "WINDLASS_FABRIC" => peer_groups: Switch = Switch::On, by switch;
        "on, off", "on",
        "Whether the ranks of a new communicator within one host meet, agree and map each other's memory when it is made. Its sends, receives, all-to-alls, gathers and scatters then run over that memory, without connections of NCCL.";

        "WINDLASS_LAZY" => lazy: Lazy = Lazy::Pairs, by lazy;
        "pairs, all, off", "pairs",
        "Which communicators within a peer group are lazy: NCCL's own is built when a call needs it that all ranks make. pairs are those of two ranks.";

        "WINDLASS_FIRST_LAUNCH_GUARD" was "WINDLASS_WARM" => first_launch_guard: Switch = Switch::On, by switch;
        "on, off", "on",
        "Whether, in each process, the first communicator with a peer group on a device is NCCL's own and not lazy, over which the rank then sends itself a byte: NCCL's first kernels on a device wait until nothing runs there, so for a receive of ours that waits. off saves that time and memory, but a first collective beside a receive that waits may then hang: only for programs in which that cannot be.";

        "WINDLASS_CACHE_MAX" was "WINDLASS_PARK" => cache_bytes_max: u64 = 1 << 30, by bytes_or_none;
        "bytes, with K, M, G or T for powers of 1024; 0 for none", "1G",
        "How much device memory the NCCL communicators behind ended lazy ones may keep in this process (at most 16 of them), to be used again by new ones of the same ranks, devices and configuration that ncclCommInitRank and its variants make. What nobody uses for 5 seconds ends, and all where device memory is short: at once if no communicator of the process is alive, else at the next init or destroy.";

        "WINDLASS_SESSIONS_MAX" was "WINDLASS_MEETINGS_MAX" => sessions_max: usize = 1024, by number;
        "number", "1024",
        "Ids made by this process whose ranks can still meet, each with a listening socket; communicators of further ids are NCCL's alone.";

        "WINDLASS_HEAP_MAX" was "WINDLASS_ARENA_MAX" => heap_bytes_max: u64 = 8 << 30, by bytes;
        "bytes, with K, M, G or T for powers of 1024", "8G",
        "How much device memory of its own (rings and counters of communicators) Windlass may have on each device in this process; it takes what communicators need, in steps, and gives it back. Each takes 23, 51 or 76 MiB for 2, 4 or 8 ranks, and more when its rings grow. A communicator for which that is not enough is left to NCCL.";

        "WINDLASS_POOL" => pool_bytes_max: u64 = 2 << 30, by pool;
        "off, bytes, with K, M, G or T for powers of 1024", "2G",
        "How much memory of ncclMemAlloc that the program has freed is kept on each device, to be handed out again, for two seconds; from the first communicator with a peer group on, and never more than an eighth of what is free. It goes back when memory is short. off keeps nothing.";

        "WINDLASS_REGISTER" => register: Register = Register::Auto, by register;
        "auto, on, off", "auto",
        "Whether the buffers of large all-gathers within a peer group are registered with NCCL where that is safe. auto: where it was measured to profit (compute capability 9.0, no multicast, NCCL 2.28 and later); on: everywhere, since NCCL 2.19.3.";

        "WINDLASS_COLLECTIVES" was "WINDLASS_FAST" => collectives: Collectives = Collectives::Auto, by collectives;
        "auto, off", "auto",
        "Whether kernels of ours run the small and middle collectives of a peer group of at most 8 ranks, on any pointers. auto: up to the sizes to which they were measured to be faster than NCCL's, 16 KiB where nobody measured; never where NCCL_ALGO, NCCL_PROTO or a CTA policy is set. All ranks must say the same, or none has them.";

        "WINDLASS_BATCH" => batch: Batch = Batch::All, by batch;
        "all, small, off", "all",
        "Which collectives of a group, of those within their limits for `WINDLASS_COLLECTIVES`, one kernel of ours runs together. all: those of at most 8 MiB each, of one kind and reduction at most 8 MiB together (2 ranks: all-reduces 32, reduce-scatters 48, all-gathers 128), where more than 16 KiB are within its limit. small: those of at most 64 KiB (all-gathers and reduce-scatters 128), 512 units of 256 bytes a kernel, counted from each rank to each other. off: none. What no kernel runs together is ours up to two kernels of a group, from 1 MiB on four, and NCCL's where there would be more. The most cautious rank's holds.";

        "WINDLASS_TUNING" => tuning: Option<PathBuf> = None, by path;
        "path", "the built-in table",
        "A table that `windlass tune` wrote: up to which sizes kernels of ours run which collectives. What it does not say is as the built-in table has it. All ranks must have the same, or the built-in one holds on all of them; one that cannot be read is none.";

        "WINDLASS_STAGING_MAX" => staging_bytes_max: u64 = 512 << 20, by bytes;
        "bytes, with K, M, G or T for powers of 1024", "512M",
        "How much device memory a communicator may hold to stand for buffers that cannot be registered in a call whose other ranks' are; larger calls are never registered.";

        "WINDLASS_WINDOWS" => windows: Windows = Windows::Keep, by windows;
        "keep, off", "keep",
        "Whether windows over memory of `ncclMemAlloc` stay when they are deregistered, to be found again by ncclCommWindowRegister. keep: in a peer group without multicast (NCCL's NVLS), from NCCL 2.28.3 on, where WINDLASS_POOL is not off; not where NCCL_ALGO, NCCL_PROTO or a CTA policy is set, or NCCL_WIN_ENABLE=0. The most cautious rank's holds.";

        "WINDLASS_CHECK" => check: Switch = Switch::Off, by switch;
        "on, off", "off",
        "Whether ranks of a peer group tell each other what they call, and a warning names the rank whose collective or window registration differs, or that has not come for 10 seconds. For finding faults: calls take longer. All ranks must say so, or it is off. Raises WINDLASS_LOG to warn where that is not set.";

        "WINDLASS_HANG_TIMEOUT" was "WINDLASS_STUCK_AFTER" => hang_timeout: Duration = Duration::from_secs(60), by seconds;
        "seconds", "60",
        "How long what runs here and does not move, a send, receive or collective, or a registration of a window, waits for a rank whose process is dead, before it is given up: the communicator gets an asynchronous error, the registration ncclRemoteError.";
    }
}

/// Read elsewhere: where the real library is searched for, and by the command.
const READ_ELSEWHERE: &[Description] = &[
    Description {
        name: "WINDLASS_NCCL",
        was: None,
        values: "path",
        default: "searched for",
        about: "The real libnccl.so.2, or the folder that holds it. If it cannot be used, no other is tried.",
    },
    Description {
        name: "WINDLASS_LIBRARY",
        was: None,
        values: "path",
        default: "beside the command",
        about: "The libwindlass.so that the `windlass` command uses; read by the command only.",
    },
];

/// Every option.
pub fn options() -> impl Iterator<Item = &'static Description> + Clone {
    OF_STARTUP.iter().chain(OF_CONFIG).chain(READ_ELSEWHERE)
}

/// The option with this name, also by its earlier one.
pub(super) fn option(name: &str) -> Option<&'static Description> {
    options().find(|option| option.name == name || option.was == Some(name))
}
