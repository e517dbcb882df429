//! The one list of NCCL's variables that change what Windlass does. `docs/nccl-variables.md` is made from it.

use super::Found;
use super::effect::Effect;
use crate::config::values::number_as_in_c as number;

/// When NCCL, and so Windlass, reads a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Once: at the first `ncclMemAlloc` or init of the process.
    FirstAllocation,
    /// Once: at the first init of the process.
    FirstInit,
    /// At every init, split and shrink.
    EveryInit,
}

/// A row of the list.
#[derive(Debug)]
pub struct Variable {
    /// The name of the variable.
    pub name: &'static str,
    /// The values that have an effect, in words.
    pub values: &'static str,
    /// One of these values.
    pub example: &'static str,
    /// When the variable is read, unless NCCL_NO_CACHE names it.
    pub read: Moment,
    /// Version code of the first release that knows the variable; 0 for all that Windlass loads.
    pub since: i32,
    /// What NCCL does by such a value, and why Windlass follows.
    pub why: &'static str,
    /// Known programs that set the variable by themselves, and when.
    pub set_by: &'static str,
    effect: fn(&str) -> Option<Effect>,
}

/// Every variable of NCCL's that Windlass follows.
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "NCCL_ENV_PLUGIN",
        values: "any but none",
        example: "my_plugin",
        read: Moment::FirstInit,
        since: 22807,
        why: "The plugin supplies values of variables that no environment shows, so Windlass cannot follow them. NCCL looks for `libnccl-env.so` by itself, and so does Windlass.",
        set_by: "no program known",
        effect: |text| (!text.eq_ignore_ascii_case("none")).then_some(Effect::UnseenValues),
    },
    Variable {
        name: "NCCL_P2P_DISABLE",
        values: "1",
        example: "1",
        read: Moment::FirstInit,
        since: 0,
        why: "NCCL uses no peer access between GPUs. It is set where peer access is broken.",
        set_by: "users, where peer access is broken",
        effect: |text| (number(text) == 1).then_some(Effect::NoPeerAccess),
    },
    Variable {
        name: "NCCL_P2P_LEVEL",
        values: "LOC, 0",
        example: "LOC",
        read: Moment::FirstInit,
        since: 0,
        why: "NCCL uses no peer access between GPUs.",
        set_by: "slime's recipes set NVL, which has no effect here",
        effect: |text| {
            let is_zero = text.starts_with('0') && number(text) == 0;
            (text == "LOC" || is_zero).then_some(Effect::NoPeerAccess)
        },
    },
    Variable {
        name: "NCCL_COMM_ID",
        values: "any",
        example: "10.0.0.1:5000",
        read: Moment::EveryInit,
        since: 0,
        why: "Every rank makes its own id from this address, so an id cannot lead ranks to each other.",
        set_by: "no program known",
        effect: |_| Some(Effect::OwnIds),
    },
    Variable {
        name: "NCCL_COMM_BLOCKING",
        values: "0",
        example: "0",
        read: Moment::FirstInit,
        since: 0,
        why: "NCCL's calls return before NCCL has done its part, so ranks meet behind an init that has an id, on a thread of Windlass's. The variable overrides `blocking` of a configuration; so does the value 1, with which inits wait.",
        set_by: "no program known",
        effect: |text| match number(text) {
            0 => Some(Effect::NonBlocking),
            1 => Some(Effect::Blocking),
            _ => None,
        },
    },
    Variable {
        name: "NCCL_HOSTID",
        values: "any",
        example: "node7",
        read: Moment::FirstInit,
        since: 0,
        why: "NCCL takes ranks with different values for ranks of different hosts.",
        set_by: "users, to try several hosts on one",
        effect: |text| Some(Effect::Host(fingerprint(text))),
    },
    Variable {
        name: "NCCL_LAUNCH_MODE",
        values: "GROUP, in any case of letters",
        example: "GROUP",
        read: Moment::EveryInit,
        since: 0,
        why: "A launch waits for those of all ranks of the same process. Where every process has one rank, nothing changes. NCCL takes the last init's value for all communicators of a process, Windlass each init's own.",
        set_by: "vLLM and torchtitan in batch-invariant mode; advice for JAX with one process",
        effect: |text| text.eq_ignore_ascii_case("GROUP").then_some(Effect::LaunchBarrier),
    },
    Variable {
        name: "NCCL_LAUNCH_ORDER_IMPLICIT",
        values: "any number but 0",
        example: "1",
        read: Moment::FirstInit,
        since: 22602,
        why: "NCCL orders the launches of all communicators of a device. Kernels of Windlass would not be in that order. The field `launchOrderImplicit` of a configuration does the same for one communicator and its children.",
        set_by: "no program known",
        effect: |text| (number(text) != 0).then_some(Effect::ImplicitOrder),
    },
    Variable {
        name: "NCCL_RUNTIME_CONNECT",
        values: "0",
        example: "0",
        read: Moment::FirstInit,
        since: 22203,
        why: "NCCL connects at the init, so that its memory is there before the program measures what is free.",
        set_by: "TensorRT-LLM, for its estimate of the KV cache",
        effect: |text| (number(text) == 0).then_some(Effect::ConnectsAtInit),
    },
    Variable {
        name: "NCCL_CUMEM_ENABLE",
        values: "0, and negative numbers but -2",
        example: "0",
        read: Moment::FirstAllocation,
        since: 0,
        why: "NCCL allocates by cudaMalloc and shares by legacy IPC. Windlass's own memory of peer groups does not depend on it.",
        set_by: "SGLang without --enable-symm-mem, verl's rollouts, slime",
        effect: |text| (number(text) <= 0 && number(text) != CHOOSES_ITSELF).then_some(Effect::NoCuMem),
    },
    Variable {
        name: "NCCL_ALGO",
        values: "any, but ^ before a list of only NVLS, NVLSTree, CollNetDirect, CollNetChain and PAT",
        example: "Ring",
        read: Moment::EveryInit,
        since: 0,
        why: "Somebody chose the algorithm, and with it the order of sums. A list that only leaves out algorithms of multicast and the network chooses none.",
        set_by: "vLLM and torchtitan in batch-invariant mode, SGLang and Megatron-LM in deterministic mode, verl with full determinism, MaxText; PyTorch with deterministic algorithms sets ^NVLS, which has no effect here",
        effect: |text| (!only_leaves_out(text)).then_some(Effect::Algorithms),
    },
    Variable {
        name: "NCCL_PROTO",
        values: "any",
        example: "Simple",
        read: Moment::EveryInit,
        since: 0,
        why: "Somebody chose the protocol.",
        set_by: "vLLM and torchtitan in batch-invariant mode, verl with full determinism, JAX's documentation, MaxText",
        effect: |_| Some(Effect::Algorithms),
    },
    Variable {
        name: "NCCL_CTA_POLICY",
        values: "1, 2, EFFICIENCY, ZERO, or both words with a bar between",
        example: "EFFICIENCY",
        read: Moment::FirstInit,
        since: 22703,
        why: "Somebody chose how NCCL spends blocks.",
        set_by: "Megatron-Bridge with --nccl_ub",
        effect: |text| {
            let is_word =
                |word: &str| ["EFFICIENCY", "ZERO"].iter().any(|known| word.eq_ignore_ascii_case(known));
            (number(text) != 0 || text.split('|').any(is_word)).then_some(Effect::Algorithms)
        },
    },
    Variable {
        name: "NCCL_MAX_CTAS",
        values: "a number above 0, as 8",
        example: "8",
        read: Moment::FirstInit,
        since: 0,
        why: "It limits the blocks of NCCL's kernels, and so of Windlass's. Below 24, native collectives serve up to 64 KiB for each block.",
        set_by: "vLLM with expert balancing over DeepGEMM (8)",
        effect: |text| u32::try_from(number(text)).ok().filter(|most| *most > 0).map(Effect::MaxCtas),
    },
    Variable {
        name: "NCCL_WIN_ENABLE",
        values: "0",
        example: "0",
        read: Moment::FirstInit,
        since: 22703,
        why: "NCCL makes no windows.",
        set_by: "no program known",
        effect: |text| (number(text) == 0).then_some(Effect::NoWindows),
    },
    Variable {
        name: "NCCL_LOCAL_REGISTER",
        values: "0",
        example: "0",
        read: Moment::FirstInit,
        since: 21901,
        why: "NCCL does not use registered buffers.",
        set_by: "no program known",
        effect: |text| (number(text) == 0).then_some(Effect::NoRegistration),
    },
    Variable {
        name: "NCCL_P2P_USE_CUDA_MEMCPY",
        values: "any number but 0",
        example: "1",
        read: Moment::FirstInit,
        since: 0,
        why: "NCCL copies by copy engines, which do not use registered buffers.",
        set_by: "no program known",
        effect: |text| (number(text) != 0).then_some(Effect::NoRegistration),
    },
    Variable {
        name: "NCCL_NVLS_ENABLE",
        values: "0",
        example: "0",
        read: Moment::FirstInit,
        since: 0,
        why: "With multicast NCCL is faster at some sizes, and binds windows at places that all ranks must have alike.",
        set_by: "SGLang without --enable-symm-mem, Megatron-Bridge, MaxText, batch-invariant modes; 1: Megatron-LM with --use-nccl-ub",
        effect: |text| (number(text) == 0).then_some(Effect::NoMulticast),
    },
    Variable {
        name: "NCCL_GRAPH_MIXING_SUPPORT",
        values: "0; any other number undoes graphUsageMode 0 and 1",
        example: "0",
        read: Moment::FirstInit,
        since: 0,
        why: "The program guarantees that a graph overlaps with no other and with no eager call of the same communicator. The events between them are left out, so that collectives may stand in the bodies of conditional nodes.",
        set_by: "SGLang with decode context parallelism",
        effect: |text| Some(if number(text) == 0 { Effect::GraphsUnordered } else { Effect::GraphsOrdered }),
    },
    Variable {
        name: "NCCL_COMM_SPLIT_SHARE_RESOURCES",
        values: "any number but 0",
        example: "1",
        read: Moment::FirstInit,
        since: 0,
        why: "A communicator and those split from it have the same memory of NCCL's.",
        set_by: "no program known",
        effect: shares,
    },
    Variable {
        name: "NCCL_COMM_SHRINK_SHARE_RESOURCES",
        values: "any number but 0",
        example: "1",
        read: Moment::FirstInit,
        since: 22703,
        why: "A communicator and those shrunk from it have the same memory of NCCL's.",
        set_by: "no program known",
        effect: shares,
    },
];

/// The value of NCCL_CUMEM_ENABLE with which NCCL decides by itself.
const CHOOSES_ITSELF: i64 = -2;

/// Whether a value of NCCL_ALGO only leaves out algorithms that do not make the order of sums between GPUs of one host.
fn only_leaves_out(text: &str) -> bool {
    let known = ["NVLS", "NVLSTree", "CollNetDirect", "CollNetChain", "PAT"];
    let is_known = |name: &str| known.iter().any(|known| known.eq_ignore_ascii_case(name));
    text.strip_prefix('^').is_some_and(|names| names.split(',').all(is_known))
}

fn shares(text: &str) -> Option<Effect> {
    (number(text) != 0).then_some(Effect::SharedResources)
}

/// The FNV-1a hash of a text: it is the same on all ranks.
fn fingerprint(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Variable {
    /// The effect of a value in a release (0 if unknown). As in NCCL, an empty value counts as not set.
    pub fn found(&'static self, value: String, version: i32) -> Option<Found> {
        let is_known = version == 0 || version >= self.since;
        let effect = (self.effect)(&value).filter(|_| is_known && !value.is_empty())?;
        Some(Found { variable: self, value, effect })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::nccl::Settings;

    fn effect(name: &str, value: &str) -> Option<Effect> {
        let variable = VARIABLES.iter().find(|variable| variable.name == name).unwrap();
        variable.found(value.into(), 22809).map(|found| found.effect)
    }

    /// Each row's example has an effect, an empty value has none, and no name stands twice.
    #[test]
    fn rows() {
        for variable in VARIABLES {
            assert!(effect(variable.name, variable.example).is_some(), "{}", variable.name);
            assert_eq!(effect(variable.name, ""), None, "{}", variable.name);
            assert_eq!(VARIABLES.iter().filter(|other| other.name == variable.name).count(), 1);
        }
    }

    /// Values are taken as NCCL takes them: numbers as C reads them, words as they are.
    #[test]
    fn values() {
        for (name, value, expected) in [
            ("NCCL_P2P_DISABLE", "0x1", Some(Effect::NoPeerAccess)),
            ("NCCL_P2P_DISABLE", "2", None),
            ("NCCL_P2P_LEVEL", "NVL", None),
            ("NCCL_P2P_LEVEL", "0", Some(Effect::NoPeerAccess)),
            ("NCCL_P2P_LEVEL", "loc", None),
            ("NCCL_P2P_LEVEL", " 0", None),
            ("NCCL_P2P_LEVEL", "1", None),
            ("NCCL_LAUNCH_MODE", "group", Some(Effect::LaunchBarrier)),
            ("NCCL_LAUNCH_MODE", "PARALLEL", None),
            ("NCCL_LAUNCH_ORDER_IMPLICIT", "0", None),
            ("NCCL_ALGO", "^NVLS", None),
            ("NCCL_ALGO", "^nvls,NVLSTree,CollNetChain,CollNetDirect,PAT", None),
            ("NCCL_ALGO", "^NVLS,Tree", Some(Effect::Algorithms)),
            ("NCCL_ALGO", "NVLS", Some(Effect::Algorithms)),
            ("NCCL_ALGO", "allreduce:^NVLS", Some(Effect::Algorithms)),
            ("NCCL_ALGO", "^NVLS;allreduce:tree", Some(Effect::Algorithms)),
            ("NCCL_ALGO", "^", Some(Effect::Algorithms)),
            ("NCCL_PROTO", "^LL128", Some(Effect::Algorithms)),
            ("NCCL_RUNTIME_CONNECT", "1", None),
            ("NCCL_CUMEM_ENABLE", "1", None),
            ("NCCL_CUMEM_ENABLE", "no", Some(Effect::NoCuMem)),
            ("NCCL_COMM_BLOCKING", "1", Some(Effect::Blocking)),
            ("NCCL_COMM_BLOCKING", "2", None),
            ("NCCL_CUMEM_ENABLE", "-2", None),
            ("NCCL_CUMEM_ENABLE", "-1", Some(Effect::NoCuMem)),
            ("NCCL_CTA_POLICY", "0", None),
            ("NCCL_CTA_POLICY", "default", None),
            ("NCCL_CTA_POLICY", "DEFAULT|zero", Some(Effect::Algorithms)),
            ("NCCL_CTA_POLICY", "2", Some(Effect::Algorithms)),
            ("NCCL_MAX_CTAS", "12", Some(Effect::MaxCtas(12))),
            ("NCCL_MAX_CTAS", "-1", None),
            ("NCCL_NVLS_ENABLE", "2", None),
            ("NCCL_GRAPH_MIXING_SUPPORT", "1", Some(Effect::GraphsOrdered)),
            ("NCCL_ENV_PLUGIN", "none", None),
        ] {
            assert_eq!(effect(name, value), expected, "{name}={value}");
        }
        let plugin = VARIABLES.iter().find(|variable| variable.name == "NCCL_ENV_PLUGIN").unwrap();
        assert!(plugin.found("x".into(), 22803).is_none() && plugin.found("x".into(), 22807).is_some());
        assert_ne!(effect("NCCL_HOSTID", "a"), effect("NCCL_HOSTID", "b"));
        assert_eq!(effect("NCCL_HOSTID", "a"), effect("NCCL_HOSTID", "a"));
    }

    /// Without such effects there is no limit of blocks and no fingerprint of a host.
    #[test]
    fn settings() {
        let effects = [Effect::Algorithms, Effect::MaxCtas(7), Effect::Host(5)];
        let all: Settings = effects.into_iter().collect();
        assert!(all.has(Effect::Algorithms) && !all.has(Effect::NoCuMem));
        assert_eq!((all.ctas_max(), all.host()), (7, Some(5)));
        assert_eq!((Settings::default().ctas_max(), Settings::default().host()), (0, None));
    }

    impl Moment {
        fn words(self) -> &'static str {
            match self {
                Moment::FirstAllocation => "once, at the first ncclMemAlloc or init",
                Moment::FirstInit => "once, at the first init",
                Moment::EveryInit => "at every init",
            }
        }
    }

    /// The text of `docs/nccl-variables.md`.
    fn documentation() -> String {
        let head = "# NCCL's variables\n\n\
            Windlass follows NCCL's own variables. This page lists every one that changes what Windlass does. It is made from the list in\n\
            `crates/base/src/config/nccl/variables.rs`.\n\n\
            - **Where values come from.** The environment comes first, then the file that `NCCL_CONF_FILE` names (else `~/.nccl.conf`), then\n  \
            `/etc/nccl.conf`. An empty value counts as not set.\n\
            - **When they are read.** Windlass reads each variable when NCCL reads it. So `NCCL_P2P_DISABLE=1` takes effect even if a program sets it\n  \
            after `ncclGetVersion`, as long as it does so before its first init. A variable that `NCCL_NO_CACHE` names is read at every init (NCCL 2.29.7 and later).\n\
            - **Lazy communicators.** NCCL builds its part of a lazy communicator when a call needs it. NCCL reads `NCCL_ALGO`, and what else it reads at every init, only then.\n\
            - **Where to see what took effect.** `windlass doctor` lists the variables that are set in its own environment. With `WINDLASS_LOG=info` a process\n  \
            logs one line for each variable that took effect. `WINDLASS_REPORT=text` and `windlass stats` name for each communicator what it lacks.\n\
            - **What is not here.** Variables that tune only NCCL's kernels or network, such as `NCCL_BUFFSIZE`, `NCCL_NTHREADS`, `NCCL_MAX_NCHANNELS` and\n  \
            `NCCL_IB_HCA`. They act on what NCCL runs. `NCCL_MAX_CTAS` limits Windlass's kernels, too. Windlass warns of no `NCCL_` name.\n\
            - **`NCCL_CUMEM_ENABLE=0` and checkpoints.** Some users set this variable because memory that processes share through cuMem may prevent CUDA\n  \
            checkpointing. Peer groups share memory in that way whatever the variable says. Set `WINDLASS_PEER_GROUPS=off` in a process that is to be checkpointed.\n\n\
            The rows in **bold** take something away.\n\n\
            | variable | values with an effect | read | what changes | why | who sets it |\n|---|---|---|---|---|---|\n";
        let row = |variable: &'static Variable| {
            let effect = (variable.effect)(variable.example);
            let changes = match effect {
                Some(effect) if effect.loses() => format!("**{effect}**"),
                Some(effect) => effect.to_string(),
                None => String::new(),
            };
            let Variable { name, values, read, since, why, set_by, .. } = variable;
            let since = match since {
                0 => String::new(),
                code => format!(" (from NCCL {}.{}.{})", code / 10000, code / 100 % 100, code % 100),
            };
            format!("| `{name}` | {values}{since} | {} | {changes} | {why} | {set_by} |\n", read.words())
        };
        head.to_owned() + &VARIABLES.iter().map(row).collect::<String>()
    }

    /// docs/nccl-variables.md is this table.
    #[test]
    fn documentation_is_fresh() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/nccl-variables.md");
        if std::env::var_os("WINDLASS_BLESS").is_some() {
            std::fs::write(file, documentation()).unwrap();
        }
        let committed = std::fs::read_to_string(file).unwrap_or_default();
        assert!(committed == documentation(), "docs/nccl-variables.md is stale: run with WINDLASS_BLESS=1");
    }
}
