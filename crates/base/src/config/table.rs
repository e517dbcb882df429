//! The one table of options. A row has all of an option: name, field, type, default and parser, and for readers the values, the default
//! and one sentence. [`Startup`], [`Config`], the parser and `docs/options.md` come from it. A new option is a new row.

use std::path::PathBuf;
use std::time::Duration;

use super::values::{
    bytes, bytes_or_none, cache, collectives, lazy, level, order, path, pool, register, report, seconds,
    switch,
};
use super::{Cache, Collectives, Lazy, Order, Register, Report, Switch};

/// The documentation of an option.
#[derive(Debug)]
pub struct Description {
    /// The name of the variable.
    pub name: &'static str,
    /// The values that it takes.
    pub values: &'static str,
    /// The value that holds when the variable is not set.
    pub default: &'static str,
    /// What the option does, in short sentences.
    pub about: &'static str,
}

/// Makes a struct with one field for each row, and the list of the rows' descriptions.
macro_rules! options {
    (
        $(#[$about:meta])*
        pub struct $struct:ident, $descriptions:ident {
            $($name:literal => $field:ident: $type:ty = $value:expr, by $parser:ident; $values:literal, $default:literal, $sentence:literal;)*
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
            /// Sets the field of the option `name`. Gives none if this struct has no such option, an error if `text`
            /// cannot be read.
            pub(super) fn take(&mut self, name: &str, text: &str) -> Option<Result<(), ()>> {
                match name {
                    $($name => Some($parser(text).map(|value| self.$field = value).ok_or(())),)*
                    _ => None,
                }
            }
        }

        const $descriptions: &[Description] = &[
            $(Description { name: $name, values: $values, default: $default, about: $sentence },)*
        ];
    };
}

options! {
    /// What the environment says of loading, logging and counting, at the first call of all.
    pub struct Startup, OF_STARTUP {
        "WINDLASS" => windlass: Switch = Switch::On, by switch;
        "on, off", "on",
        "Windlass is active. With off, every call goes straight to the real NCCL, and Windlass counts nothing.";

        "WINDLASS_LOG" => log: ::log::LevelFilter = ::log::LevelFilter::Error, by level;
        "off, error, warn, info, debug, trace", "error",
        "The lowest severity of log lines that are written. Lines have the format of NCCL's. error: only what makes a call fail. \
         off: no other line on standard error either, such as why a communicator is on NCCL.";

        "WINDLASS_LOG_FILE" => log_file: Option<PathBuf> = None, by path;
        "path", "standard error",
        "The file to which log lines are written. %h becomes the host's name, and %p the process id.";

        "WINDLASS_REPORT" => report: Option<Report> = None, by report;
        "text, json, text:path, json:path", "none",
        "The process prints a report of its calls when it exits, to standard error or to the file at path. A process without a communicator prints none. %h becomes the host's name, and %p the process id.";

        "WINDLASS_STATS" => stats: Switch = Switch::On, by switch;
        "on, off", "on",
        "The process keeps its counters in shared memory, where `windlass stats` reads them. They take less than 1 MiB in /dev/shm.";
    }
}

options! {
    /// What the environment says of everything else, at the first id, init or `ncclMemAlloc`.
    pub struct Config, OF_CONFIG {
        "WINDLASS_PEER_GROUPS" => peer_groups: Switch = Switch::On, by switch;
        "on, off", "on",
        "The ranks of a new communicator on one host form a peer group: at init each rank maps memory of every other rank. Sends, receives, all-to-alls, gathers and scatters then run over that memory, without NCCL's connections. off leaves all communicators to NCCL.";

        "WINDLASS_LAZY" => lazy: Lazy = Lazy::Pairs, by lazy;
        "pairs, all, off", "pairs",
        "NCCL builds its part of a lazy communicator only when a call needs NCCL on all ranks. pairs: communicators of two ranks are lazy. all: those of any size. off: none. Only communicators with a peer group can be lazy.";

        "WINDLASS_FIRST_LAUNCH_GUARD" => first_launch_guard: Switch = Switch::On, by switch;
        "on, off", "on",
        "NCCL builds the first communicator with a peer group at once, on each device of a process, and runs one message of 1 byte there. Without that message, NCCL's first kernel could wait for a Windlass receive that waits for that kernel. off saves init time and memory, but such a program hangs. Use off only where no receive waits during a first NCCL collective.";

        "WINDLASS_CACHE_MAX" => cache_bytes_max: u64 = 1 << 30, by bytes_or_none;
        "whole bytes, as 512M; K, M, G or T are powers of 1024; 0 for none", "1G",
        "The device memory, in bytes, of NCCL communicators that the process keeps after lazy communicators ended. It keeps at most 16. A new communicator from ncclCommInitRank or its variants reuses one with the same ranks, devices and configuration. A kept communicator ends after 5 seconds without use, or earlier when device memory is short. While other communicators are alive, it ends at the next init or destroy.";

        "WINDLASS_HEAP_MAX" => heap_bytes_max: u64 = 8 << 30, by bytes;
        "whole bytes, as 512M; K, M, G or T are powers of 1024", "8G",
        "The device memory, in bytes, that Windlass's own buffers may take on each device of the process. A communicator takes about 17, 41 or 64 MiB for 2, 4 or 8 ranks, and more when its rings grow. Windlass allocates in steps and frees what no communicator needs. A communicator without room stays on NCCL.";

        "WINDLASS_POOL" => pool_bytes_max: u64 = 2 << 30, by pool;
        "off, whole bytes, as 512M; K, M, G or T are powers of 1024", "2G",
        "The bytes of freed ncclMemAlloc memory that Windlass keeps on each device for reuse. Windlass keeps a block for two seconds, and never more than an eighth of the device's free memory. Keeping begins with the first communicator that has a peer group. Kept memory is freed when memory is short. off keeps nothing, no windows either.";

        "WINDLASS_REGISTER" => register: Register = Register::Auto, by register;
        "auto, on, off", "auto",
        "Windlass registers the buffers of all-gathers of 8 MiB and more with NCCL, where that is safe. It does so for eager calls in a peer group that NCCL runs. auto: from NCCL 2.28 on, where it was measured to be faster: on compute capability 9.0 without multicast, or by `windlass tune` on this machine. on: wherever NCCL can. off: never.";

        "WINDLASS_COLLECTIVES" => collectives: Collectives = Collectives::Auto, by collectives;
        "auto, off", "auto",
        "Windlass's kernels run small and middle collectives of peer groups of at most 8 ranks, on any pointers. auto: up to the limits of WINDLASS_TUNING, of WINDLASS_CACHE, or built in, in this order; 16 KiB on GPUs that nobody measured. They are off where NCCL_ALGO, NCCL_PROTO or a CTA policy is set, unless WINDLASS_ORDER is fixed. All ranks need the same value, or none has them.";

        "WINDLASS_ORDER" => order: Order = Order::Auto, by order;
        "auto, fixed, strict", "auto",
        "The order in which all-reduces, reduces and reduce-scatters combine the ranks' values, if their operation rounds: sums, averages, products and pre-multiplied sums of floats. fixed: rank 0's value first, then rank 1's, and so on, by native collectives at every size. An element's result then depends on the ranks' values of that element alone. NCCL_ALGO, NCCL_PROTO and CTA policies no longer switch native collectives off. What cannot be served goes to NCCL with one warning for each communicator, and is counted. strict: such a call returns ncclInvalidUsage instead. auto: the order changes with the size. All ranks need the same value: a rank whose call is refused leaves the others waiting. fixed and strict raise WINDLASS_LOG to warn, unless that is set.";

        "WINDLASS_TUNING" => tuning: Option<PathBuf> = None, by path;
        "path", "the built-in table",
        "The file of a table that `windlass tune --out` wrote. The table sets up to which size Windlass runs each collective, and counts before the cache. One rank's file holds for all ranks. Where two ranks' files differ in a limit, the built-in limit holds.";

        "WINDLASS_CACHE" => cache: Cache = Cache::Usual, by cache;
        "absolute path, off", "windlass in $XDG_CACHE_HOME or ~/.cache",
        "The folder of limits that `windlass run` and `windlass tune` measured on this machine. Processes read it at init. The file's name is a digest of GPU, driver, NCCL and NCCL's variables. Limits of other circumstances never count. off: none are kept or read.";

        "WINDLASS_HANG_TIMEOUT" => hang_timeout: Duration = Duration::from_secs(60), by seconds;
        "whole seconds, as 60", "60",
        "The seconds that an operation waits, without progress, for a rank whose process is dead. This holds for sends, receives and collectives that Windlass runs, and for window registrations. A communicator then gets an asynchronous error, and a registration returns ncclRemoteError.";
    }
}

/// The option that the search for the real library reads.
const READ_ELSEWHERE: &[Description] = &[Description {
    name: "WINDLASS_NCCL",
    values: "path",
    default: "searched for",
    about: "The path of the real libnccl.so.2, or the folder that holds it. If it cannot be used, Windlass tries no other library.",
}];

/// Every option.
pub fn options() -> impl Iterator<Item = &'static Description> + Clone {
    OF_STARTUP.iter().chain(OF_CONFIG).chain(READ_ELSEWHERE)
}

/// The option with this name.
pub(super) fn option(name: &str) -> Option<&'static Description> {
    options().find(|option| option.name == name)
}
