//! The simulator's environment variables, read once, at the first use.

use std::net::Ipv4Addr;
use std::sync::OnceLock;
use std::time::Duration;

pub struct Settings {
    /// `WINDLASS_SIM_STRICT`, default 1: whether misuse that NCCL would not detect is a failure.
    pub strict: bool,
    /// `WINDLASS_SIM_TIMEOUT_MS`, default 20000: how long an operation waits without progress.
    pub timeout: Duration,
    /// `WINDLASS_SIM_NCCL_LOG`, default 0: whether each call writes a line to stderr.
    pub log: bool,
    /// `NCCL_LEGACY_CUDA_REGISTER`, default 0: as in NCCL, cudaMalloc memory can be registered.
    pub legacy_registration: bool,
    /// `WINDLASS_SIM_LOST_INITS`, default none: which inits of this process fail after they have joined, by number from 1.
    pub lost_inits: Vec<u64>,
    /// `WINDLASS_SIM_REFUSED_INITS`, default none: which inits of this process fail before they join, by number from 1.
    pub refused_inits: Vec<u64>,
    /// `WINDLASS_SIM_DEREGISTER_MS`, default 0: how long the end of a registration takes.
    pub deregistration: Duration,
    /// `WINDLASS_SIM_ALLOC_MS`, default 0: how long `ncclMemAlloc` takes.
    pub allocation: Duration,
    /// `WINDLASS_SIM_FAILED_LAUNCHES`, default none: which launches of collectives of this process return an error but run,
    /// by number from 1.
    pub failed_launches: Vec<u64>,
    /// `WINDLASS_SIM_KEPT_REGISTRATIONS`, default none: which ends of registrations of this process fail, by number from 1.
    pub kept_registrations: Vec<u64>,
    /// `WINDLASS_SIM_ADDRESSES`, default 127.0.0.1: roots of ids and their ranks listen at the first of these that is this host's.
    pub addresses: Vec<Ipv4Addr>,
    /// `NCCL_GRAPH_MIXING_SUPPORT`, default 1: whether graphs are ordered against other graphs and eager operations.
    pub mixes_graphs: bool,
    /// `WINDLASS_SIM_NCCL_RINGS`, default 0: whether the sum of each rank's share starts at another rank, as in rings.
    pub folds_in_rings: bool,
    /// `WINDLASS_SIM_NCCL_VERSION`, default 22809: the release that is simulated in `ncclGetVersion`, in the order of a group's
    /// communicators and collectives, in windows, memory and roots.
    pub version: i32,
}

pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        strict: number("WINDLASS_SIM_STRICT", 1) != 0,
        timeout: Duration::from_millis(number("WINDLASS_SIM_TIMEOUT_MS", 20_000)),
        log: number("WINDLASS_SIM_NCCL_LOG", 0) != 0,
        legacy_registration: number("NCCL_LEGACY_CUDA_REGISTER", 0) != 0,
        lost_inits: numbers("WINDLASS_SIM_LOST_INITS"),
        refused_inits: numbers("WINDLASS_SIM_REFUSED_INITS"),
        deregistration: Duration::from_millis(number("WINDLASS_SIM_DEREGISTER_MS", 0)),
        allocation: Duration::from_millis(number("WINDLASS_SIM_ALLOC_MS", 0)),
        failed_launches: numbers("WINDLASS_SIM_FAILED_LAUNCHES"),
        kept_registrations: numbers("WINDLASS_SIM_KEPT_REGISTRATIONS"),
        addresses: addresses(),
        mixes_graphs: number("NCCL_GRAPH_MIXING_SUPPORT", 1) != 0,
        folds_in_rings: number("WINDLASS_SIM_NCCL_RINGS", 0) != 0,
        version: number("WINDLASS_SIM_NCCL_VERSION", 22_809) as i32,
    })
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

fn addresses() -> Vec<Ipv4Addr> {
    let text = std::env::var("WINDLASS_SIM_ADDRESSES").unwrap_or_default();
    let given = text.split(',').filter_map(|address| address.trim().parse().ok());
    given.chain([Ipv4Addr::LOCALHOST]).collect()
}

fn numbers(name: &str) -> Vec<u64> {
    let text = std::env::var(name).unwrap_or_default();
    text.split(',').filter_map(|number| number.trim().parse().ok()).collect()
}
