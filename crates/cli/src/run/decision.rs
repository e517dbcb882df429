//! Decides whether `run` runs a command, by plain facts.

use super::loading::{self, Loading};
use super::preloads::{self, Preload};
use super::shared_memory::{self, Room};
use crate::elf::{self, Bits, Elf};
use crate::program::Program;
use crate::{installation, text};
use anyhow::Result;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The facts on which the decision depends.
pub struct Situation {
    /// The command as the user typed it.
    pub command: OsString,
    pub program: Result<Program, String>,
    pub windlass: Result<Library, String>,
    /// What the program's loader would load with Windlass.
    pub loading: Loading,
    pub shared_memory: Room,
    pub real: Option<Library>,
    /// What is said where there is no real library.
    pub not_found: String,
    /// What is preloaded already.
    pub preloads: Vec<Preload>,
    pub environment: BTreeMap<OsString, OsString>,
}

/// A library and its ELF facts.
pub struct Library {
    pub path: PathBuf,
    pub elf: Elf,
}

impl Library {
    /// The Windlass of this installation.
    pub fn installed() -> Result<Library> {
        let path = installation::windlass_library()?;
        Ok(Library { elf: elf::read(&path)?, path })
    }
}

/// Whether to run the command, and with which variables.
#[derive(Debug, Default, PartialEq)]
pub struct Decision {
    /// The reasons not to run; empty means run.
    pub refusals: Vec<String>,
    pub warnings: Vec<String>,
    /// The libraries in front of Windlass and behind it, if there are any in front.
    pub preloads: Option<String>,
    /// Variables to set.
    pub set: Vec<(&'static str, OsString)>,
    /// LD_PRELOAD without Windlass; none if nothing else is preloaded.
    pub preload_without: Option<OsString>,
}

impl Decision {
    /// Prints what is told of a run. Returns whether there are refusals.
    pub fn tell(&self) -> bool {
        let warnings = self.warnings.iter().map(|warning| format!("warning: {warning}"));
        let told = self.preloads.iter().cloned().chain(warnings).chain(self.refusals.iter().cloned());
        told.for_each(|line| text::tell(format_args!("windlass: {line}\n")));
        if !self.refusals.is_empty() {
            text::tell(format_args!("windlass: not run, because Windlass would not take effect\n"));
        }
        !self.refusals.is_empty()
    }
}

/// Programs that run their command elsewhere, without this environment.
const ELSEWHERE: [&str; 5] = ["docker", "podman", "nerdctl", "kubectl", "ssh"];

/// Programs that pass their environment to a container, where its paths may not exist.
const CONTAINERS: [&str; 3] = ["apptainer", "singularity", "enroot"];

/// Variables in which clients name the NCCL library that they open by path.
const LIBRARY_VARIABLES: [&str; 3] =
    ["VLLM_NCCL_SO_PATH", "SGLANG_NCCL_SO_PATH", "SGLANG_DIFFUSION_NCCL_SO_PATH"];

/// The variable with which PyTorch makes communicators that do not wait.
const TORCH_NONBLOCKING: &str = "TORCH_NCCL_USE_COMM_NONBLOCKING";

pub fn decide(situation: &Situation) -> Decision {
    let mut decision = Decision::default();
    let command = Path::new(&situation.command).file_name().and_then(OsStr::to_str).unwrap_or_default();
    if ELSEWHERE.contains(&command) {
        decision.refusals.push(format!(
            "{command} runs its command elsewhere, without this environment: use `windlass run` on that side"
        ));
        return decision;
    }
    if CONTAINERS.contains(&command) {
        decision.warnings.push(format!(
            "{command} runs its command in a container, where these paths may not exist: use `windlass run` inside it"
        ));
    }
    match &situation.program {
        Ok(program) => decision.refusals.extend(refuse_program(program)),
        Err(reason) => decision.refusals.push(reason.clone()),
    }
    let variables = situation.environment.iter().map(|(name, value)| (name.clone(), value.clone()));
    let parsed = windlass_base::config::parse(variables);
    decision.refusals.extend(shared_memory::refuse(&situation.shared_memory, &parsed.startup));
    decision.warnings.extend(shared_memory::warn(&situation.shared_memory, &parsed.startup));
    if let (Ok(program), Ok(windlass)) = (&situation.program, &situation.windlass) {
        decision.refusals.extend(loading::refuse(program, windlass, &situation.loading));
    }
    match (&situation.windlass, &situation.real) {
        (Err(reason), _) => decision.refusals.push(reason.clone()),
        (Ok(windlass), None) => {
            if !windlass.elf.is_windlass() {
                decision.refusals.push(not_windlass(windlass));
            }
            decision.refusals.push(situation.not_found.clone());
        }
        (Ok(windlass), Some(real)) => {
            decision.refusals.extend(refuse_libraries(windlass, real));
            decision.warnings.extend(environment_warnings(&situation.environment, &windlass.path));
            let all = &situation.preloads;
            decision.set = vec![
                ("LD_PRELOAD", preloads::with(&windlass.path, all)),
                ("WINDLASS_NCCL", real.path.clone().into()),
            ];
            let is_any_in_front = all.iter().any(|preload| preload.is_interposer);
            decision.preloads = preloads::told(all).filter(|_| is_any_in_front);
            decision.preload_without = preloads::without(all);
        }
    }
    decision
}

/// The reason why a program would not load the preload.
pub fn refuse_program(program: &Program) -> Option<String> {
    let name = program.executable.display();
    if program.elf.bits == Bits::Is32 {
        return Some(format!("{name} is a 32-bit program; Windlass is a 64-bit library"));
    }
    if program.elf.machine != elf::native_machine() {
        let (its, ours) = (elf::machine_name(program.elf.machine), elf::machine_name(elf::native_machine()));
        return Some(format!("{name} is a program for {its}; Windlass is a library for {ours}"));
    }
    if program.elf.loader.is_none() {
        return Some(format!(
            "{name} is statically linked: no loader reads LD_PRELOAD for it; link it dynamically"
        ));
    }
    if let Some(privilege) = &program.privilege {
        return Some(format!(
            "the loader ignores LD_PRELOAD for {name}, because {privilege}; run what it starts with `windlass run`"
        ));
    }
    program.cleared_by.as_ref().map(|argument| {
        format!("env {argument} starts {name} without LD_PRELOAD; use `env {argument} windlass run -- ...` instead")
    })
}

fn refuse_libraries(windlass: &Library, real: &Library) -> Option<String> {
    if !windlass.elf.is_windlass() {
        return Some(not_windlass(windlass));
    }
    if windlass.path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':')) {
        return Some(format!(
            "{}: LD_PRELOAD cannot carry a path with a space or a colon; move Windlass",
            windlass.path.display()
        ));
    }
    let missing = real.elf.functions_missing_in(&windlass.elf);
    (!missing.is_empty()).then(|| {
        format!(
            "{} exports {} functions that Windlass lacks ({}): calls of them would bypass Windlass; take a newer Windlass or an older NCCL",
            real.path.display(),
            missing.len(),
            missing.join(", ")
        )
    })
}

fn not_windlass(library: &Library) -> String {
    format!("{} is not Windlass: it exports no {}", library.path.display(), elf::WINDLASS_MARK)
}

/// Warnings about variables that keep Windlass from taking effect.
pub fn environment_warnings(environment: &BTreeMap<OsString, OsString>, windlass: &Path) -> Vec<String> {
    let warning = |name: &str| {
        let value = environment.get(OsStr::new(name)).filter(|value| value.as_bytes().contains(&b'/'))?;
        (Path::new(value) != windlass).then(|| {
            format!(
                "{name} is {}: a library opened by its path escapes LD_PRELOAD; unset it, or set {name}={}",
                value.display(),
                windlass.display()
            )
        })
    };
    let mut warnings: Vec<String> = LIBRARY_VARIABLES.into_iter().filter_map(warning).collect();
    let value =
        |name: &str| environment.get(OsStr::new(name)).map(|value| value.to_string_lossy().to_lowercase());
    let is_set = |value: String| ["1", "y", "yes", "t", "true"].contains(&value.as_str());
    if value(TORCH_NONBLOCKING).is_some_and(is_set) && value("NCCL_COMM_BLOCKING").as_deref() != Some("1") {
        warnings.push(format!(
            "{TORCH_NONBLOCKING} is set: PyTorch's inits do not wait, so no communicator is lazy, and those made in groups or from others are \
             on NCCL; unset it, or set NCCL_COMM_BLOCKING=1 on all ranks"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDLASS: &str = "/w/libwindlass.so";
    const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

    fn library(path: &str, functions: &[&str]) -> Library {
        let functions = functions.iter().map(|name| (*name).to_owned()).collect();
        Library {
            path: path.into(),
            elf: Elf { machine: elf::native_machine(), functions, ..Elf::default() },
        }
    }

    fn program(change: impl FnOnce(&mut Program)) -> Result<Program, String> {
        let elf = Elf { machine: elf::native_machine(), loader: Some(LOADER.into()), ..Elf::default() };
        let mut program =
            Program { executable: "/bin/train".into(), elf, python: None, privilege: None, cleared_by: None };
        change(&mut program);
        Ok(program)
    }

    fn situation() -> Situation {
        Situation {
            command: "train".into(),
            program: program(|_| ()),
            windlass: Ok(library(WINDLASS, &["ncclGetVersion", "ncclSend", elf::WINDLASS_MARK])),
            loading: Loading { has_loader: true, ..Loading::default() },
            shared_memory: Ok(1 << 30),
            real: Some(library("/n/libnccl.so.2", &["ncclGetVersion", "ncclSend"])),
            not_found: "found no real NCCL".into(),
            preloads: Vec::new(),
            environment: BTreeMap::new(),
        }
    }

    fn refusal(situation: &Situation) -> String {
        decide(situation).refusals.join("\n")
    }

    /// A plain program runs with two variables and without a message.
    #[test]
    fn runs() {
        let decision = decide(&situation());
        assert_eq!((decision.refusals.len(), decision.warnings.len()), (0, 0), "{decision:?}");
        let expected = [("LD_PRELOAD", WINDLASS.into()), ("WINDLASS_NCCL", "/n/libnccl.so.2".into())];
        assert_eq!(decision.set, expected);
    }

    /// Programs that would not load the preload are refused, each with its reason.
    #[test]
    fn refuses_programs() {
        for (program, reason) in [
            (program(|program| program.elf.loader = None), "statically linked"),
            (program(|program| program.elf.bits = Bits::Is32), "32-bit"),
            (program(|program| program.elf.machine = 8), "is a program for"),
            (
                program(|program| program.privilege = Some("it is set-user-id to user 0".into())),
                "set-user-id",
            ),
            (
                program(|program| program.privilege = Some("it has file capabilities".into())),
                "file capabilities",
            ),
            (
                program(|program| program.cleared_by = Some("-i".into())),
                "env -i starts /bin/train without LD_PRELOAD",
            ),
            (Err("x: command not found in PATH".into()), "command not found"),
        ] {
            let refusal = refusal(&Situation { program, ..situation() });
            assert!(refusal.contains(reason), "{reason}: {refusal}");
        }
    }

    /// Libraries that cannot work are refused: no NCCL, no Windlass, missing functions.
    #[test]
    fn refuses_libraries() {
        let none = refusal(&Situation { real: None, ..situation() });
        assert_eq!(none, "found no real NCCL");
        let other =
            refusal(&Situation { windlass: Ok(library(WINDLASS, &["ncclGetVersion"])), ..situation() });
        assert!(other.contains("is not Windlass"), "{other}");
        let newer = Some(library("/n/libnccl.so.2", &["ncclGetVersion", "ncclTeleport"]));
        let newer = refusal(&Situation { real: newer, ..situation() });
        assert!(newer.contains("exports 1 functions that Windlass lacks (ncclTeleport)"), "{newer}");
        let missing =
            refusal(&Situation { windlass: Err("libwindlass.so is not in /x".into()), ..situation() });
        assert!(missing.contains("libwindlass.so is not in /x"), "{missing}");
        let spaced =
            library("/my folder/libwindlass.so", &["ncclGetVersion", "ncclSend", elf::WINDLASS_MARK]);
        assert!(refusal(&Situation { windlass: Ok(spaced), ..situation() }).contains("with a space"));
    }

    /// A program that runs its command elsewhere is refused for that reason alone.
    #[test]
    fn refuses_elsewhere() {
        let program = program(|program| program.elf.loader = None);
        let refusal = refusal(&Situation { command: "/usr/bin/docker".into(), program, ..situation() });
        assert!(refusal.starts_with("docker runs its command elsewhere"), "{refusal}");
        assert_eq!(refusal.lines().count(), 1, "{refusal}");
    }

    /// A missing loader is refused, and so is a missing folder for counters.
    #[test]
    fn refuses_surroundings() {
        let loader = refusal(&Situation { loading: Loading::default(), ..situation() });
        assert_eq!(loader, format!("/bin/train asks for the loader {LOADER}, which is not there"));
        let no_memory = || Situation { shared_memory: Err("Permission denied".into()), ..situation() };
        assert!(refusal(&no_memory()).starts_with("/dev/shm cannot be written (Permission denied)"));
        let environment = BTreeMap::from([("WINDLASS_STATS".into(), "off".into())]);
        assert_eq!(refusal(&Situation { environment, ..no_memory() }), "");
        let full = decide(&Situation { shared_memory: Ok(4096), ..situation() });
        assert!(full.refusals.is_empty() && full.warnings[0].contains("has 4 KiB free"), "{full:?}");
    }

    /// Variables that bypass the preload give a warning, unless they name Windlass or no path.
    #[test]
    fn warns() {
        let warnings = |name: &str, value: &str| {
            let environment = BTreeMap::from([(name.into(), value.into())]);
            decide(&Situation { environment, ..situation() }).warnings
        };
        assert!(
            warnings("VLLM_NCCL_SO_PATH", "/y/libnccl.so.2")[0]
                .contains("set VLLM_NCCL_SO_PATH=/w/libwindlass.so")
        );
        assert_eq!(warnings("VLLM_NCCL_SO_PATH", WINDLASS), Vec::<String>::new());
        assert_eq!(warnings("SGLANG_NCCL_SO_PATH", "libnccl.so.2"), Vec::<String>::new());
        assert_eq!(warnings("SGLANG_DIFFUSION_NCCL_SO_PATH", "/y/libnccl.so.2").len(), 1);
        let container = decide(&Situation { command: "/usr/bin/apptainer".into(), ..situation() });
        assert!(container.refusals.is_empty());
        assert!(container.warnings[0].contains("apptainer runs its command in a container"));
    }
}
