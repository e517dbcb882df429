//! Options of earlier versions that are no longer read, and what a user does instead.

/// Names of 0.1 and 0.2, each with one sentence of what to do.
const REMOVED: &[(&str, &str)] = &[
    ("WINDLASS_FABRIC", "use WINDLASS_PEER_GROUPS instead"),
    ("WINDLASS_WARM", "use WINDLASS_FIRST_LAUNCH_GUARD instead"),
    ("WINDLASS_PARK", "use WINDLASS_CACHE_MAX instead"),
    ("WINDLASS_ARENA_MAX", "use WINDLASS_HEAP_MAX instead"),
    ("WINDLASS_FAST", "use WINDLASS_COLLECTIVES instead"),
    ("WINDLASS_STUCK_AFTER", "use WINDLASS_HANG_TIMEOUT instead"),
    ("WINDLASS_MEETINGS_MAX", "the limit is 1024 unique ids; unset it"),
    ("WINDLASS_SESSIONS_MAX", "the limit is 1024 unique ids; unset it"),
    ("WINDLASS_STAGING_MAX", "the limit is 512 MiB; WINDLASS_REGISTER=off needs no staging buffers"),
    ("WINDLASS_BATCH", "unset it; WINDLASS_COLLECTIVES=off switches off all native collectives"),
    ("WINDLASS_WINDOWS", "windows are kept; WINDLASS_POOL=off keeps none"),
    ("WINDLASS_CALIBRATE", "use `windlass run --no-calibrate`, or WINDLASS_CACHE=off"),
    ("WINDLASS_LIBRARY", "the command uses the libwindlass.so of its own installation; unset it"),
    ("WINDLASS_CHECK", "calls are kept without it: `windlass hang --after 0` compares those of all ranks"),
    ("WINDLASS_NVTX", "ranges need no option; unset it"),
];

/// What to do about a name that is no longer read. None for every other name.
pub(super) fn instead(name: &str) -> Option<&'static str> {
    REMOVED.iter().find(|(removed, _)| *removed == name).map(|(_, instead)| *instead)
}
