//! What the facts mean.

use super::facts::{Facts, NcclFacts, NcclVariable, PEER_GROUPS_OFF};
use super::running::Running;
use crate::WINDLASS_OFF;
use crate::asking::{Gpus, Pair};
use crate::nccl::version_text;
use crate::search::not_found;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Display;
use windlass_base::gpu::library::{CUDA_MIN, DRIVER_MIN};
use windlass_base::stats::limits::Source;
use windlass_base::stats::order;
use windlass_base::stats::peer_group;

/// How bad it is, least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Good,
    /// Worth knowing, nothing is lost.
    Note,
    /// Windlass works, but not all that it can do.
    Limited,
    /// Windlass would not take effect.
    Broken,
}

/// One thing found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    pub level: Level,
    pub what: String,
}

/// More ranks have no peer group.
const PEER_GROUP_RANKS_MAX: usize = windlass_bootstrap::negotiated::RANKS_MAX;

/// Less `/dev/shm` than this is a container's default, too little for NCCL's own needs with several ranks.
const SHARED_MEMORY_MIN: u64 = 256 << 20;

/// Whether Windlass helps on this machine, and what to do next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    pub exit_code: u8,
    pub verdict: String,
    pub next: String,
}

/// What all findings come to.
pub fn verdict(facts: &Facts, findings: &[Finding]) -> Verdict {
    let of = |exit_code, verdict: &str, next: &str| Verdict {
        exit_code,
        verdict: verdict.into(),
        next: next.into(),
    };
    let devices = facts.gpus.as_ref().map_or(0, |gpus| gpus.devices.len());
    let mend = match devices {
        0 | 1 => "run windlass doctor where the job runs, with its GPUs, and mend there what is BROKEN",
        _ => "mend every finding that is BROKEN",
    };
    match findings.iter().map(|finding| finding.level).max() {
        Some(Level::Broken) if facts.off.contains(&"WINDLASS=off") => of(
            1,
            "Windlass is switched off: NCCL would run every call",
            "unset WINDLASS where Windlass shall run",
        ),
        Some(Level::Broken)
            if facts.nccl.is_none() || facts.windlass.is_none() || !facts.refusals.is_empty() =>
        {
            of(1, "Windlass would not take effect: windlass run refuses", mend)
        }
        Some(Level::Broken) => of(1, "Windlass does nothing here: NCCL would run every call", mend),
        Some(Level::Limited) if devices < 2 => of(
            3,
            "this machine has no two GPUs to communicate between",
            "run windlass doctor where the job runs, with its GPUs (docker run --gpus all); windlass demo --sim tries Windlass here",
        ),
        Some(Level::Limited) => of(
            3,
            "Windlass works here, but lacks what is LIMITED",
            "mend every finding that is LIMITED, or accept it",
        ),
        _ if facts.is_simulated => {
            of(0, "Windlass works on the simulator", "windlass run --sim -- your program")
        }
        _ if facts.unmeasured.is_some() => of(
            0,
            "Windlass works here, but how much it helps was not measured on this machine",
            "windlass tune, on idle GPUs; then windlass run -- your program",
        ),
        _ => of(0, "Windlass helps here, with all that it can do", "windlass run -- your program"),
    }
}

/// Every finding, in the order of the facts.
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    libraries(facts, &mut findings);
    facts.refusals.iter().for_each(|refusal| findings.add(Level::Broken, refusal));
    let complaints = facts.warnings.iter().chain(&facts.option_complaints).chain(&facts.removed_options);
    let complaints = complaints.chain(&facts.autoload_problem);
    complaints.for_each(|complaint| findings.add(Level::Limited, complaint));
    for off in &facts.off {
        match *off {
            PEER_GROUPS_OFF => findings.add(Level::Broken, format!("{off}: NCCL runs every call")),
            "WINDLASS_COLLECTIVES=off" => {
                findings.add(Level::Limited, format!("{off}: NCCL runs every collective"))
            }
            _ => findings.add(Level::Broken, WINDLASS_OFF),
        }
    }
    facts.table_problems.iter().for_each(|problem| findings.add(Level::Limited, problem));
    match (&facts.gpus, &facts.gpus_problem) {
        (Some(gpus), _) => judge_gpus(gpus, &mut findings),
        (None, problem) => findings.add(
            Level::Limited,
            format!(
                "no GPUs: {}; `windlass demo --sim` runs on the simulator",
                problem.as_deref().unwrap_or("not asked")
            ),
        ),
    }
    surroundings(facts, &mut findings);
    if let Some(gpus) = &facts.gpus {
        room(gpus, facts.heap_bytes_max, &mut findings);
    }
    // Where NCCL runs every call, limits hold for none.
    if findings.0.iter().all(|finding| finding.level < Level::Broken) {
        limits(facts, &mut findings);
    }
    in_order(facts, &mut findings);
    facts.processes.iter().for_each(|running| second_nccl(running, &mut findings));
    facts.processes.iter().for_each(|running| order_of(running, &mut findings));
    findings.0
}

/// Up to which sizes Windlass runs collectives, and what that rests on.
fn limits(facts: &Facts, findings: &mut Findings) {
    let mut of_source: BTreeMap<Reverse<Source>, Vec<usize>> = BTreeMap::new();
    for limit in &facts.limits {
        of_source.entry(Reverse(limit.source)).or_default().push(limit.ranks);
    }
    for (Reverse(source), ranks) in of_source {
        let (first, last) = (ranks[0], ranks[ranks.len() - 1]);
        let ranks = if first == last { first.to_string() } else { format!("{first} to {last}") };
        let what = format!("all-reduces of {ranks} ranks run in Windlass's kernels up to {}", source.worth());
        if source < Source::BuiltIn {
            findings.add(Level::Note, what)
        } else {
            findings.add(Level::Good, what)
        }
    }
    facts.unmeasured.iter().for_each(|why| findings.add(Level::Note, why));
    // Where limits are there, nobody needs to write any.
    if let (Some(problem), Some(_)) = (&facts.cache_problem, &facts.unmeasured) {
        let is_chosen = facts.variables.contains_key("WINDLASS_CACHE");
        return findings.add(if is_chosen { Level::Limited } else { Level::Note }, problem);
    }
    if let Some(folder) = &facts.passing_cache
        && facts.gpus.is_some()
    {
        findings.add(Level::Note, format!(
            "limits that are measured here end with this container: mount a folder at {}, or each start measures anew",
            folder.display()
        ));
    }
}

/// Whether what is asked of the order of sums can be had.
fn in_order(facts: &Facts, findings: &mut Findings) {
    let Some(order) = facts.order else { return };
    let lost = if order == "strict" { "refused" } else { "left to NCCL" };
    match &facts.against_order {
        Some(cause) => findings.add(Level::Limited, format!("WINDLASS_ORDER={order}, but {cause}: every reduction that rounds is {lost}")),
        None => findings.add(Level::Good, format!(
            "WINDLASS_ORDER={order}: reductions that round run in fixed order, in communicators of at most {} ranks with a peer group; others are {lost}",
            windlass_transport::native::RANKS_MAX
        )),
    }
}

/// What a program that runs says of it.
fn order_of(running: &Running, findings: &mut Findings) {
    let Running { process, command, order, ordered, .. } = running;
    let Some(line) = order::text(order, *ordered) else { return };
    let what = format!("process {process} ({command}): {line}");
    findings.add(if ordered.1 > 0 { Level::Limited } else { Level::Good }, what);
}

/// How many communicators of all GPUs may have a peer group at once: what the option allows, and the smallest GPU has.
fn room(gpus: &Gpus, heap_bytes_max: u64, findings: &mut Findings) {
    let ranks = gpus.devices.len();
    if !(2..=PEER_GROUP_RANKS_MAX).contains(&ranks) {
        return;
    }
    let bytes = |ranks| windlass_engine::peers::communicator_bytes(ranks as u32);
    let (each, size) = (bytes(ranks), crate::text::size);
    if heap_bytes_max < bytes(2) {
        let what = format!(
            "WINDLASS_HEAP_MAX={}: a communicator takes {} MiB or more, so NCCL runs every call",
            size(heap_bytes_max),
            bytes(2).div_ceil(1 << 20)
        );
        return findings.add(Level::Broken, what);
    }
    let memory = gpus.devices.iter().map(|device| device.memory_bytes).min().unwrap_or_default();
    let bounds = [(heap_bytes_max, "WINDLASS_HEAP_MAX"), (memory, "the smallest GPU's memory")];
    let (most, of) = bounds.into_iter().min().unwrap_or_default();
    findings.add(if most < each { Level::Limited } else { Level::Good }, format!(
        "{of} ({}) has room for {} communicators of {ranks} ranks at once, {} MiB each on every GPU; further ones are left to NCCL",
        size(most),
        most / each,
        each.div_ceil(1 << 20)
    ));
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, level: Level, what: impl Display) {
        self.0.push(Finding { level, what: what.to_string() });
    }
}

fn libraries(facts: &Facts, findings: &mut Findings) {
    facts.windlass_problem.iter().for_each(|problem| findings.add(Level::Broken, problem));
    let Some(nccl) = &facts.nccl else {
        return findings.add(Level::Broken, not_found(&facts.search, ""));
    };
    match (nccl.version, &nccl.load_problem) {
        (Some(version), _) if version < peer_group::NCCL_SINCE => findings.add(
            Level::Broken,
            format!(
                "NCCL {} is older than 2.26: NCCL runs every call; use NCCL 2.26.2 or later",
                version_text(version)
            ),
        ),
        (Some(version), _) => findings.add(Level::Good, format!("NCCL {} loads", version_text(version))),
        (None, problem) => {
            let problem = problem.as_deref().unwrap_or("not asked");
            return findings.add(Level::Broken, format!("{} does not load: {problem}", nccl.path.display()));
        }
    }
    if facts.windlass.is_some() {
        through_windlass(nccl, findings);
    }
}

fn through_windlass(nccl: &NcclFacts, findings: &mut Findings) {
    match (nccl.version_through_windlass, &nccl.through_problem) {
        (through, _) if through.is_some() && through == nccl.version => {
            findings.add(Level::Good, "Windlass loads and reaches it")
        }
        (Some(through), _) => findings.add(
            Level::Broken,
            format!(
                "Windlass reaches another NCCL: it reports {}, expected {}",
                version_text(through),
                version_text(nccl.version.unwrap_or(0))
            ),
        ),
        (None, problem) => findings.add(
            Level::Broken,
            format!("Windlass does not reach NCCL: {}", problem.as_deref().unwrap_or("not asked")),
        ),
    }
    match &nccl.lacking_in_windlass[..] {
        [] => findings.add(Level::Good, format!("Windlass has all {} functions of this NCCL", nccl.functions)),
        missing => findings.add(Level::Broken, format!(
            "this NCCL exports {} functions that Windlass lacks ({}): take a newer Windlass or an older NCCL",
            missing.len(),
            missing.join(", ")
        )),
    }
    if nccl.lacking_in_nccl > 0 {
        findings.add(
            Level::Note,
            format!(
                "{} functions of later NCCL versions answer ncclInvalidUsage, because this NCCL lacks them",
                nccl.lacking_in_nccl
            ),
        );
    }
}

fn judge_gpus(gpus: &Gpus, findings: &mut Findings) {
    if gpus.cuda_version < CUDA_MIN {
        findings.add(
            Level::Broken,
            format!(
                "driver {} is older than {DRIVER_MIN}: NCCL runs every call",
                gpus.driver.as_deref().unwrap_or("of this machine")
            ),
        );
    }
    match gpus.devices.len() {
        0 => return findings.add(Level::Limited, "the driver has no GPU (CUDA_VISIBLE_DEVICES?)"),
        1 => {
            return findings.add(Level::Limited,
                "one GPU: nobody to communicate with on this machine (Slurm: --gpu-bind=none shows a task all)",
            );
        }
        count => findings.add(Level::Good, format!("{count} GPUs")),
    }
    let without = |has: fn(&crate::asking::Device) -> bool| {
        let lacking = gpus.devices.iter().enumerate().filter(|(_, device)| !has(device));
        lacking.map(|(ordinal, _)| ordinal.to_string()).collect::<Vec<_>>().join(", ")
    };
    for (what, loss, lacking) in [
        (
            "virtual memory calls (cuMemCreate)",
            "no pool, no native paths",
            without(|device| device.virtual_memory),
        ),
        (
            "sharing memory by file descriptor",
            "ranks in several processes cannot share a pool",
            without(|device| device.posix_handles),
        ),
    ] {
        if lacking.is_empty() {
            findings.add(Level::Good, format!("{what} on every GPU"));
        } else {
            findings.add(Level::Limited, format!("no {what} on GPU {lacking}: {loss}"));
        }
    }
    let pairs = |lacking: fn(&Pair) -> bool| {
        let pairs = gpus.pairs.iter().filter(|pair| lacking(pair));
        pairs.map(|pair| format!("{}→{}", pair.from, pair.to)).collect::<Vec<_>>().join(" ")
    };
    let without_access = pairs(|pair| !pair.peer_access);
    let without_link = pairs(|pair| pair.nvlink == Some(false));
    let has_link = |pair: &Pair| pair.peer_access && pair.nvlink != Some(false);
    let (level, what) = if !gpus.pairs.iter().any(has_link) {
        (Level::Broken, "no two GPUs have NVLink and peer access: NCCL runs every call".to_owned())
    } else if !without_access.is_empty() {
        (
            Level::Limited,
            format!("no peer access {without_access}: communicators with these pairs are forwarded"),
        )
    } else if !without_link.is_empty() {
        (Level::Limited, format!("no NVLink {without_link}: communicators with these pairs are forwarded"))
    } else if gpus.pairs.iter().any(|pair| pair.nvlink.is_none()) {
        (Level::Note, "peer access between all pairs; NVML did not say whether by NVLink".to_owned())
    } else {
        let what =
            "NVLink and peer access between all pairs: communicators of these GPUs can have a peer group";
        (Level::Good, what.to_owned())
    };
    findings.add(level, what);
}

fn surroundings(facts: &Facts, findings: &mut Findings) {
    facts.preloads.iter().chain(&facts.framework).for_each(|note| findings.add(Level::Note, note));
    match facts.shared_memory {
        Some(room) if room.total_bytes < SHARED_MEMORY_MIN => findings.add(Level::Limited, format!(
            "/dev/shm has {} MiB: NCCL and Windlass's counters need shared memory; give a container --shm-size=1g or --ipc=host",
            room.total_bytes >> 20
        )),
        Some(room) if room.free_bytes < SHARED_MEMORY_MIN => findings.add(Level::Limited, format!("/dev/shm has {} MiB free of {}", room.free_bytes >> 20, room.total_bytes >> 20)),
        Some(_) => {}
        None => findings.add(Level::Limited, "no /dev/shm: no counters for `windlass stats`"),
    }
    for NcclVariable { name, value, effect, loses, all } in &facts.nccl_variables {
        let what = format!("{name}={value}: {effect}");
        match (all, loses) {
            (true, _) => findings.add(Level::Broken, format!("{what} (unset {name})")),
            (false, true) => findings.add(Level::Limited, what),
            (false, false) => findings.add(Level::Note, what),
        }
    }
}

/// Handles of lazy communicators are ours: another NCCL answers ncclInvalidArgument to them, and calls into it pass us by.
fn second_nccl(running: &Running, findings: &mut Findings) {
    let Running { process, command, nccl, .. } = running;
    let [first, others @ ..] = &nccl[..] else { return };
    if others.is_empty() {
        return;
    }
    let others: Vec<String> = others.iter().map(|path| path.display().to_string()).collect();
    findings.add(Level::Limited, format!(
        "process {process} ({command}) has a second NCCL mapped: {} beside {}; calls into it bypass Windlass, and it \
         refuses lazy communicators (WINDLASS_LAZY=off makes none)",
        others.join(", "),
        first.display()
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asking::Device;
    use crate::doctor::facts::{SharedMemory, nccl_variable};
    use crate::tune::Limit;
    use windlass_base::config::nccl::VARIABLES;

    fn good() -> Facts {
        let device = Device {
            name: "H200".into(),
            memory_bytes: 141 << 30,
            virtual_memory: true,
            posix_handles: true,
            ..Device::default()
        };
        let pair = |from, to| Pair { from, to, peer_access: true, native_atomics: true, nvlink: Some(true) };
        Facts {
            windlass: Some("/w/libwindlass.so".into()),
            nccl: Some(NcclFacts {
                path: "/n/libnccl.so.2".into(),
                version: Some(22809),
                version_through_windlass: Some(22809),
                functions: 90,
                ..NcclFacts::default()
            }),
            gpus: Some(Gpus {
                cuda_version: CUDA_MIN,
                devices: vec![device; 2],
                pairs: vec![pair(0, 1), pair(1, 0)],
                ..Gpus::default()
            }),
            heap_bytes_max: 8 << 30,
            shared_memory: Some(SharedMemory { total_bytes: 1 << 30, free_bytes: 1 << 30 }),
            ..Facts::default()
        }
    }

    fn worst(facts: &Facts) -> (Level, String) {
        let findings = judge(facts);
        let worst = findings.iter().max_by_key(|finding| finding.level).unwrap();
        (worst.level, worst.what.clone())
    }

    /// What bounds the number of communicators is named: the option, or the memory of a small GPU.
    #[test]
    fn rooms() {
        let mut small = good();
        small.gpus.as_mut().unwrap().devices[1].memory_bytes = 1 << 30;
        for (facts, words) in [(good(), "WINDLASS_HEAP_MAX (8G)"), (small, "the smallest GPU's memory (1G)")]
        {
            let found = judge(&facts);
            let room = found.iter().find(|finding| finding.what.contains(" has room for ")).unwrap();
            assert!(room.what.starts_with(words), "{room:?}");
        }
    }

    fn set(name: &str, value: &str) -> Facts {
        let variable = VARIABLES.iter().find(|variable| variable.name == name).unwrap();
        let found = variable.found(value.into(), 22809).unwrap();
        Facts { nccl_variables: vec![nccl_variable(found, false)], ..good() }
    }

    fn running(nccl: &[&str]) -> Running {
        let nccl = nccl.iter().map(std::path::PathBuf::from).collect();
        Running { process: 7, command: "python3 train.py".into(), nccl, ..Running::default() }
    }

    /// A driver without the functions that Windlass needs.
    #[test]
    fn old_driver() {
        let gpus = Gpus { cuda_version: 11080, driver: Some("520.61.05".into()), ..good().gpus.unwrap() };
        let found = worst(&Facts { gpus: Some(gpus), ..good() });
        assert_eq!(found, (Level::Broken, "driver 520.61.05 is older than 525: NCCL runs every call".into()));
    }

    /// A machine as it should be.
    #[test]
    fn all_good() {
        assert_eq!(worst(&good()).0, Level::Good, "{:?}", judge(&good()));
        let with_one = Facts { processes: vec![running(&["/a/libnccl.so.2"]), running(&[])], ..good() };
        assert_eq!(judge(&with_one), judge(&good()));
    }

    /// What keeps Windlass from taking effect.
    #[test]
    fn broken() {
        let nccl = |change: fn(&mut NcclFacts)| {
            let mut facts = good();
            change(facts.nccl.as_mut().unwrap());
            facts
        };
        for (facts, what) in [
            (Facts { nccl: None, ..good() }, "found no real NCCL"),
            (
                Facts {
                    windlass_problem: Some("libwindlass.so is not in /x".into()),
                    windlass: None,
                    ..good()
                },
                "libwindlass.so is not",
            ),
            (nccl(|nccl| nccl.version = None), "does not load"),
            (nccl(|nccl| nccl.version_through_windlass = Some(21803)), "it reports 2.18.3, expected 2.28.9"),
            (nccl(|nccl| nccl.version_through_windlass = None), "does not reach NCCL"),
            (
                nccl(|nccl| nccl.lacking_in_windlass = vec!["ncclTeleport".into()]),
                "1 functions that Windlass lacks (ncclTeleport)",
            ),
            (Facts { refusals: vec!["x is statically linked".into()], ..good() }, "statically linked"),
            (Facts { off: vec!["WINDLASS=off"], ..good() }, "WINDLASS=off: every call"),
            (
                Facts { off: vec![PEER_GROUPS_OFF], ..good() },
                "WINDLASS_PEER_GROUPS=off: NCCL runs every call",
            ),
            (
                set("NCCL_P2P_DISABLE", "1"),
                "NCCL_P2P_DISABLE=1: peer groups are off, so NCCL runs every call",
            ),
            (
                nccl(|nccl| (nccl.version, nccl.version_through_windlass) = (Some(22503), Some(22503))),
                "NCCL 2.25.3 is older than 2.26: NCCL runs every call",
            ),
        ] {
            let (level, found) = worst(&facts);
            assert!(level == Level::Broken && found.contains(what), "{what}: {found}");
        }
    }

    /// What limits it.
    #[test]
    fn limited() {
        let gpus = |change: fn(&mut Gpus)| {
            let mut facts = good();
            change(facts.gpus.as_mut().unwrap());
            facts
        };
        let tiny = SharedMemory { total_bytes: 64 << 20, free_bytes: 64 << 20 };
        for (facts, what) in [
            (Facts { gpus: None, gpus_problem: Some("no driver".into()), ..good() }, "no GPUs: no driver"),
            (gpus(|gpus| gpus.devices.truncate(1)), "one GPU"),
            (gpus(|gpus| gpus.devices[1].virtual_memory = false), "on GPU 1: no pool"),
            (gpus(|gpus| gpus.pairs[1].peer_access = false), "no peer access 1→0"),
            (
                Facts { table_problems: vec!["WINDLASS_TUNING=/x: expected a table".into()], ..good() },
                "WINDLASS_TUNING=/x: ",
            ),
            (
                Facts { off: vec!["WINDLASS_COLLECTIVES=off"], ..good() },
                "WINDLASS_COLLECTIVES=off: NCCL runs every collective",
            ),
            (gpus(|gpus| gpus.pairs[0].nvlink = Some(false)), "no NVLink 0→1"),
            (Facts { shared_memory: Some(tiny), ..good() }, "/dev/shm has 64 MiB"),
            (
                set("NCCL_CUMEM_ENABLE", "0"),
                "NCCL_CUMEM_ENABLE=0: the memory pool, kept windows and registration are off",
            ),
            (
                set("NCCL_ALGO", "Ring"),
                "NCCL_ALGO=Ring: native collectives (unless WINDLASS_ORDER is fixed or strict)",
            ),
            (Facts { option_complaints: vec!["WINDLASS_LGO is unknown".into()], ..good() }, "WINDLASS_LGO"),
            (
                Facts {
                    order: Some("strict"),
                    against_order: Some("WINDLASS_COLLECTIVES=off".into()),
                    ..good()
                },
                "WINDLASS_ORDER=strict, but WINDLASS_COLLECTIVES=off: every reduction that rounds is refused",
            ),
            (
                Facts {
                    processes: vec![Running { order: "fixed".into(), ordered: (1, 2), ..running(&[]) }],
                    ..good()
                },
                "order: fixed; 2 of 3 reductions that round were not in fixed order",
            ),
            (
                Facts { processes: vec![running(&["/a/libnccl.so.2", "/b/libnccl.so.2"])], ..good() },
                "process 7 (python3 train.py) has a second NCCL mapped: /b/libnccl.so.2 beside /a/libnccl.so.2",
            ),
        ] {
            let (level, found) = worst(&facts);
            assert!(level == Level::Limited && found.contains(what), "{what}: {found}");
        }
    }

    /// Nothing is called good that does nothing, or that nobody measured.
    #[test]
    fn verdicts() {
        let of = |facts: &Facts| {
            let Verdict { exit_code, verdict, next } = verdict(facts, &judge(facts));
            (exit_code, verdict, next)
        };
        let limit = |ranks, source| Limit {
            ranks,
            collective: "all_reduce",
            bytes_max: Some(1),
            source,
            measured: String::new(),
        };
        let limits = [(2, Source::BuiltIn), (3, Source::BuiltIn), (8, Source::Model)];
        let limits = limits.map(|(ranks, source)| limit(ranks, source)).to_vec();
        let measured = Facts { limits, ..good() };
        let told = judge(&measured);
        let told: Vec<&str> = told.iter().map(|finding| &*finding.what).collect();
        assert!(told.contains(
            &"all-reduces of 2 to 3 ranks run in Windlass's kernels up to built-in limits, timed on such GPUs"
        ), "{told:?}");
        for (facts, code, words) in [
            (measured.clone(), 0, "with all that it can do"),
            (
                Facts { unmeasured: Some("limits not measured here".into()), ..measured.clone() },
                0,
                "not measured on this machine",
            ),
            (Facts { is_simulated: true, ..measured.clone() }, 0, "on the simulator"),
            (Facts { table_problems: vec!["x".into()], ..measured.clone() }, 3, "lacks what is LIMITED"),
            (Facts { gpus: None, ..measured.clone() }, 3, "no two GPUs"),
            (Facts { nccl: None, ..measured.clone() }, 1, "windlass run refuses"),
            (Facts { heap_bytes_max: 16 << 20, ..measured.clone() }, 1, "does nothing here"),
            (Facts { off: vec![PEER_GROUPS_OFF], ..measured }, 1, "does nothing here"),
        ] {
            let (exit_code, verdict, next) = of(&facts);
            assert!(
                exit_code == code && verdict.contains(words) && !next.is_empty(),
                "{exit_code} {verdict}"
            );
        }
    }

    /// What is only worth knowing.
    #[test]
    fn notes() {
        let passing = Facts { passing_cache: Some("/root/.cache/windlass".into()), ..good() };
        assert!(
            worst(&passing)
                .1
                .ends_with("mount a folder at /root/.cache/windlass, or each start measures anew")
        );
        let limit = worst(&set("NCCL_MAX_CTAS", "8"));
        assert_eq!(limit, (Level::Note, "NCCL_MAX_CTAS=8: grids have at most 8 blocks".into()));
    }
}
