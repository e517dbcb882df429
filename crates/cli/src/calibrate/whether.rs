//! Decides whether a run measures at all, by facts that are known without a GPU. Pure.

use windlass_base::config::{Cache, Collectives, Config, Startup, Switch};

/// The decision.
#[derive(Debug, PartialEq, Eq)]
pub enum Whether {
    Yes,
    No,
}

/// Variables by which launchers number ranks: if one is set, this run is one of several at once.
const RANKS: [&str; 6] =
    ["RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"];

/// Decides. `gpus_most` says how many GPUs the command may see at most, by [`CUDA_VISIBLE_DEVICES`](VISIBLE).
pub fn decide(
    startup: &Startup,
    config: &Config,
    is_simulator: bool,
    variable: impl Fn(&str) -> Option<String>,
    gpus_most: impl FnOnce() -> usize,
) -> Whether {
    let is_off = startup.windlass == Switch::Off
        || config.collectives == Collectives::Off
        || config.peer_groups == Switch::Off
        || config.cache == Cache::Off;
    let is_wanted = !is_simulator || variable(SIMULATOR_TOO).is_some();
    if is_off || !is_wanted || is_rank(&variable) {
        return Whether::No;
    }
    if is_simulator || named(variable(VISIBLE).as_deref()).min(gpus_most()) >= 2 {
        Whether::Yes
    } else {
        Whether::No
    }
}

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

    fn of(config: Config, is_simulator: bool, variables: &[(&str, &str)], gpus: usize) -> Whether {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        decide(&Startup::default(), &config, is_simulator, variable, || gpus)
    }

    /// A run measures if the command sees two GPUs, unless an option or variable forbids it.
    #[test]
    fn decisions() {
        let usual = Config::default;
        assert_eq!(of(usual(), false, &[], 2), Whether::Yes);
        assert_eq!(of(usual(), false, &[], 1), Whether::No);
        for (visible, expected) in [
            ("0,1", Whether::Yes),
            ("GPU-1,GPU-2,GPU-3", Whether::Yes),
            ("0", Whether::No),
            ("", Whether::No),
            ("-1", Whether::No),
            ("3,-1,2", Whether::No),
        ] {
            assert_eq!(of(usual(), false, &[(VISIBLE, visible)], 8), expected, "{visible}");
        }
        for off in [
            Config { collectives: Collectives::Off, ..usual() },
            Config { peer_groups: Switch::Off, ..usual() },
            Config { cache: Cache::Off, ..usual() },
        ] {
            assert_eq!(of(off, false, &[], 8), Whether::No);
        }
        let off = Startup { windlass: Switch::Off, ..Startup::default() };
        assert_eq!(decide(&off, &usual(), false, |_| None, || 8), Whether::No);
    }

    /// The simulator is measured only where a test asks; its number of GPUs does not matter.
    #[test]
    fn simulator() {
        let asked = &[(SIMULATOR_TOO, "1")];
        assert_eq!(of(Config::default(), true, &[], 8), Whether::No);
        assert_eq!(of(Config::default(), true, asked, 0), Whether::Yes);
        assert_eq!(of(Config::default(), false, asked, 2), Whether::Yes);
    }

    /// One of several ranks does not measure; a Slurm step of one task is no such rank.
    #[test]
    fn ranks() {
        for name in RANKS.into_iter().chain(["SLURM_PROCID"]) {
            assert_eq!(of(Config::default(), false, &[(name, "0")], 8), Whether::No, "{name}");
        }
        let alone = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(of(Config::default(), false, &alone, 8), Whether::Yes);
    }
}
