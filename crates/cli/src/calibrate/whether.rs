//! Decides whether a run measures at all, by facts that are known without a GPU. Pure.

use windlass_base::config::{Cache, Collectives, Config, Startup, Switch};

/// Variables by which launchers number ranks: if one is set, this run is one of several at once.
const RANKS: [&str; 6] =
    ["RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"];

/// Why the run does not measure; none if it does. `gpus_most` says how many GPUs the command may see at most, by [`CUDA_VISIBLE_DEVICES`](VISIBLE).
pub fn decide(
    startup: &Startup,
    config: &Config,
    is_simulator: bool,
    variable: impl Fn(&str) -> Option<String>,
    gpus_most: impl FnOnce() -> usize,
) -> Option<&'static str> {
    let is_off = startup.windlass == Switch::Off
        || config.collectives == Collectives::Off
        || config.peer_groups == Switch::Off
        || config.cache == Cache::Off;
    let is_unwanted = is_simulator && variable(SIMULATOR_TOO).is_none();
    let is_alone = || !is_simulator && named(variable(VISIBLE).as_deref()).min(gpus_most()) < 2;
    if is_off {
        Some("an option switches that off")
    } else if is_unwanted {
        Some("a simulator's times say nothing")
    } else if is_alone() {
        Some(ONE_GPU)
    } else if is_rank(&variable) {
        Some("`windlass run` was started for each rank")
    } else {
        None
    }
}

/// Where one GPU is visible there is nothing to measure.
pub const ONE_GPU: &str = "the command sees one GPU (Slurm: --gpu-bind=none shows it all)";

fn is_rank(variable: impl Fn(&str) -> Option<String>) -> bool {
    // A Slurm step of one task has a number, too.
    let is_step =
        || variable("SLURM_PROCID").is_some() && variable("SLURM_STEP_NUM_TASKS").as_deref() != Some("1");
    RANKS.iter().any(|name| variable(name).is_some()) || is_step()
}

/// By this variable tests let a run measure the simulator.
const SIMULATOR_TOO: &str = "WINDLASS_SIM_CALIBRATE";

const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The most GPUs that CUDA_VISIBLE_DEVICES names: CUDA stops at the first unknown name, such as -1.
fn named(visible: Option<&str>) -> usize {
    let Some(visible) = visible else { return usize::MAX };
    visible.split(',').map(str::trim).take_while(|name| !name.is_empty() && !name.starts_with('-')).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(config: Config, is_simulator: bool, variables: &[(&str, &str)], gpus: usize) -> bool {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        decide(&Startup::default(), &config, is_simulator, variable, || gpus).is_none()
    }

    /// A run measures if the command sees two GPUs, unless an option or variable forbids it.
    #[test]
    fn decisions() {
        let usual = Config::default;
        assert!(of(usual(), false, &[], 2));
        assert!(!of(usual(), false, &[], 1));
        for (visible, expected) in [
            ("0,1", true),
            ("GPU-1,GPU-2,GPU-3", true),
            ("0", false),
            ("", false),
            ("-1", false),
            ("3,-1,2", false),
        ] {
            assert_eq!(of(usual(), false, &[(VISIBLE, visible)], 8), expected, "{visible}");
        }
        for off in [
            Config { collectives: Collectives::Off, ..usual() },
            Config { peer_groups: Switch::Off, ..usual() },
            Config { cache: Cache::Off, ..usual() },
        ] {
            assert!(!of(off, false, &[], 8));
        }
        let off = Startup { windlass: Switch::Off, ..Startup::default() };
        assert!(decide(&off, &usual(), false, |_| None, || 8).is_some());
        assert_eq!(decide(&Startup::default(), &usual(), false, |_| None, || 1), Some(ONE_GPU));
    }

    /// The simulator is measured only where a test asks; its number of GPUs does not matter.
    #[test]
    fn simulator() {
        let asked = &[(SIMULATOR_TOO, "1")];
        assert!(!of(Config::default(), true, &[], 8));
        assert!(of(Config::default(), true, asked, 0));
        assert!(of(Config::default(), false, asked, 2));
    }

    /// One of several ranks does not measure; a Slurm step of one task is no such rank.
    #[test]
    fn ranks() {
        for name in RANKS.into_iter().chain(["SLURM_PROCID"]) {
            assert!(!of(Config::default(), false, &[(name, "0")], 8), "{name}");
        }
        let alone = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert!(of(Config::default(), false, &alone, 8));
    }
}
