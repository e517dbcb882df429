//! The flags and variables with which vLLM and SGLang leave all-reduces to NCCL, for a command that lacks some. Both have all-reduces of
//! their own, which come first: Windlass then sees almost no call.

use std::ffi::OsString;
use std::path::Path;

/// A framework's servers, and what switches its own all-reduces off.
struct Framework {
    name: &'static str,
    /// The variable of Windlass's plugin, which leaves all-reduces to Windlass in its own way.
    plugin: &'static str,
    /// The command, of which `serve` is the first word, and the package of `python -m`.
    command: &'static str,
    /// Each with the part of a word by which a command shows that it has said so.
    arguments: &'static [(&'static str, &'static str)],
    /// Variables that are to be 0.
    variables: &'static [&'static str],
}

/// As of vLLM 0.33 and SGLang 0.5.23. FlashInfer's and the fused ones are newer than the custom all-reduce, so not every release knows them.
const FRAMEWORKS: [Framework; 2] = [
    Framework {
        name: "vLLM",
        plugin: "WINDLASS_VLLM",
        command: "vllm",
        arguments: &[
            ("--disable-custom-all-reduce", "--disable-custom-all-reduce"),
            (
                r#"--compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'"#,
                "fuse-allreduce-rms",
            ),
        ],
        variables: &["VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM"],
    },
    Framework {
        name: "SGLang",
        plugin: "WINDLASS_SGLANG",
        command: "sglang",
        arguments: &[
            ("--disable-custom-all-reduce", "--disable-custom-all-reduce"),
            (
                "--enforce-disable-flashinfer-allreduce-fusion",
                "--enforce-disable-flashinfer-allreduce-fusion",
            ),
        ],
        variables: &[],
    },
];

/// What a server's command lacks, in words; none for other commands, and where nothing is missing.
pub fn hint(command: &[OsString], variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let words: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let framework = FRAMEWORKS.iter().find(|framework| framework.is_started_by(&words))?;
    if variable(framework.plugin).is_some_and(|value| value != "off") {
        return None;
    }
    // Both take a flag with underscores, too.
    let says = |part: &str| words.iter().any(|word| word.replace('_', "-").contains(part));
    let unset = framework.variables.iter().filter(|name| variable(name).as_deref() != Some("0"));
    let unsaid = framework.arguments.iter().filter(|(_, part)| !says(part));
    let before: String = unset.map(|name| format!("{name}=0 ")).collect();
    let behind: String = unsaid.map(|(argument, _)| format!(" {argument}")).collect();
    (!before.is_empty() || !behind.is_empty()).then(|| {
        format!(
            "{} has all-reduces of its own, which come before NCCL's, so Windlass sees few all-reduces. This leaves them to NCCL, as far \
             as your release knows the options:\n  {before}windlass run -- {}{behind}",
            framework.name,
            words.join(" ")
        )
    })
}

impl Framework {
    fn is_started_by(&self, words: &[String]) -> bool {
        let Some((program, arguments)) = words.split_first() else { return false };
        let is_command = Path::new(program).file_name().is_some_and(|name| name == self.command);
        // Behind Python's first `-m` come the module's own arguments.
        let module = arguments.iter().skip_while(|word| *word != "-m").nth(1);
        let is_module = module.is_some_and(|module| module.split('.').next() == Some(self.command));
        is_command && arguments.first().is_some_and(|word| word == "serve") || is_module
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint_of(words: &[&str], variables: &[&str]) -> Option<String> {
        let command: Vec<OsString> = words.iter().map(OsString::from).collect();
        hint(&command, |name| variables.contains(&name).then(|| "0".into()))
    }

    /// Servers of both frameworks are known by every way to start them; other commands are left alone.
    #[test]
    fn which_commands() {
        for words in [
            &["vllm", "serve", "m"][..],
            &["/x/bin/vllm", "serve", "m"],
            &["python3", "-m", "vllm.entrypoints.openai.api_server"],
            &["python", "-u", "-m", "sglang.launch_server", "--tp", "2"],
            &["sglang", "serve"],
        ] {
            assert!(
                hint_of(words, &[]).is_some_and(|hint| hint.contains("--disable-custom-all-reduce")),
                "{words:?}"
            );
        }
        for words in [
            &["vllm", "bench"][..],
            &["python3", "vllm.py"],
            &["python3", "-m", "pytest", "-m", "vllm"],
            &["vllm"],
            &[],
        ] {
            assert_eq!(hint_of(words, &[]), None, "{words:?}");
        }
    }

    /// Only what is missing is named.
    #[test]
    fn what_is_missing() {
        let second = |words: &[&str], variables: &[&str]| {
            hint_of(words, variables).map(|hint| hint.lines().nth(1).unwrap().trim().to_owned())
        };
        assert_eq!(
            second(&["vllm", "serve", "m"], &["VLLM_ALLREDUCE_USE_SYMM_MEM"]).unwrap(),
            "VLLM_ALLREDUCE_USE_FLASHINFER=0 windlass run -- vllm serve m --disable-custom-all-reduce --compilation-config \
             '{\"pass_config\": {\"fuse_allreduce_rms\": false}}'"
        );
        let all =
            ["vllm", "serve", "m", "--disable_custom_all_reduce", "-cc.pass_config.fuse_allreduce_rms=False"];
        let both = ["VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"];
        assert_eq!(second(&all, &both), None);
        assert_eq!(hint_of(&["vllm", "serve", "m"], &["WINDLASS_VLLM"]), None);
        assert_eq!(
            second(&["sglang", "serve", "--disable-custom-all-reduce"], &[]).unwrap(),
            "windlass run -- sglang serve --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion"
        );
    }
}
