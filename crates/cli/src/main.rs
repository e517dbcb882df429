//! The `windlass` command.

// Patterns name NCCL's own constants.
#![allow(non_upper_case_globals)]

#[macro_use]
mod text;

mod answering;
mod asking;
mod bench;
mod built;
mod calibrate;
mod collective;
mod compare;
mod counts;
mod demo;
mod doctor;
mod element;
mod elf;
mod explain;
mod gpu;
mod hang;
mod installation;
mod interruption;
mod limits;
mod machine;
mod manual;
mod nccl;
mod options;
mod program;
mod ranks;
mod run;
mod script;
mod search;
mod stats;
mod tune;

use anyhow::Result;
use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;
use thiserror::Error;
use windlass_base::config;

/// Hidden subcommands that run a rank.
const DEMO_RANK: &str = "demo-rank";
const BENCH_RANK: &str = "bench-rank";
const LIMITS_RANK: &str = "limits-rank";

/// Windlass takes the place of libnccl.so.2. This command runs programs over it, shows what it does, and measures it.
#[derive(Parser)]
#[command(after_help = "\
Does Windlass help on this machine?    windlass doctor
Run a program with it:                 windlass run -- torchrun --nproc-per-node 2 train.py
Switch it off, on all ranks:           WINDLASS=off")]
#[command(name = "windlass", version, long_version = built::long_version(), max_term_width = 100)]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Run a command over Windlass, or say why Windlass would not take effect
    Run(run::Options),
    /// Check this machine: which NCCL is found, what the GPUs can do, and what limits Windlass
    Doctor(doctor::Options),
    /// Run NCCL calls of every kind on several ranks, and check all data and Windlass's counters
    Demo(demo::Options),
    /// Time single NCCL calls with Windlass and without
    Bench(bench::Options),
    /// Run a command with Windlass and without, in turns, and compare time, memory and what it prints
    Compare(compare::Options),
    /// Measure up to which sizes Windlass's collectives are faster on this machine, for WINDLASS_TUNING
    Tune(tune::Options),
    /// Name the rank of this host that others wait for; the exit code is 3 if there is one
    Hang(hang::Options),
    /// Show the counters of programs that run over Windlass now
    Stats(stats::Options),
    /// Explain which path calls took, or would take, and by which rule
    Explain(explain::Options),
    /// Show the environment variables that set Windlass up, with their values here
    Options(options::Options),
    /// Print completions for a shell
    Completions(manual::Completions),
    /// Write man pages and completions to where shells look for them
    Manual(manual::Manual),
    #[command(name = BENCH_RANK, hide = true)]
    BenchRank,
    #[command(name = LIMITS_RANK, hide = true)]
    LimitsRank,
    #[command(name = DEMO_RANK, hide = true)]
    DemoRank,
    #[command(name = asking::SUBCOMMAND, hide = true)]
    Ask {
        #[command(subcommand)]
        question: answering::Question,
    },
}

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(error) => return refuse(error),
    };
    match act(command.action) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say!("windlass: {error:#}");
            let code = if error.is::<BadOption>() { 2 } else { 1 };
            if code == 2 {
                say!("windlass: nothing was started");
            }
            ExitCode::from(interruption::look().map_or(code, interruption::exit_code))
        }
    }
}

/// Prints what is wrong with the command line, or the help that it asks for; gives the exit code.
fn refuse(mut error: clap::Error) -> ExitCode {
    // Clap's advice is `-- --option`, with which an unknown option would be the name of a program.
    error.remove(ContextKind::Suggested);
    let is_unknown = error.kind() == ErrorKind::UnknownArgument;
    if error.kind() == ErrorKind::ValueValidation {
        // What Rust says of numbers, in words.
        let words = [
            ("invalid digit found in string", "expected a whole number"),
            ("invalid float literal", "expected a number"),
            (" is not in ", ", expected "),
            ("..=", " to "),
        ];
        let said = error.render().to_string();
        text::tell(format_args!("{}", words.iter().fold(said, |said, (from, to)| said.replace(from, to))));
    } else if error.print().is_err() {
        return ExitCode::FAILURE;
    }
    let name = std::env::args().nth(1).unwrap_or_default();
    if let (true, Some(command)) = (is_unknown, Command::command().find_subcommand(&name)) {
        let options: Vec<String> = command
            .get_arguments()
            .filter_map(|one| one.get_long().map(|long| format!("--{long}")))
            .collect();
        say!("windlass {name} has the options {}", options.join(", "));
        if name == "run" {
            say!(
                "windlass run starts one command. A launcher's options come behind it: windlass run -- torchrun --nproc-per-node 4 train.py"
            );
        }
    }
    if error.kind() == ErrorKind::InvalidSubcommand {
        let commands = Command::command();
        let names: Vec<&str> =
            commands.get_subcommands().filter(|one| !one.is_hide_set()).map(|one| one.get_name()).collect();
        say!("windlass has the commands {}", names.join(", "));
    }
    if error.use_stderr() {
        say!("windlass: nothing was started");
    }
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        // The codes below 125 are the command's own.
        _ if name == "run" => ExitCode::from(run::REFUSED),
        code => ExitCode::from(code as u8),
    }
}

/// What is wrong with an option's value. The exit code is that of options which clap refuses.
#[derive(Debug, Error)]
#[error("{0}")]
struct BadOption(String);

/// What is told of `WINDLASS=off`, in whatever words it is said.
const WINDLASS_OFF: &str = "WINDLASS=off: every call goes straight to the real NCCL";

/// Names options of the environment that are not read, and variables of NCCL's that leave it every call; the library's own lines do not
/// show them by default.
fn complain() {
    let parsed = config::parse(std::env::vars_os());
    let table = tune::file_of(&parsed.config).1;
    // Whatever release will run.
    let stopping =
        config::nccl::found(i32::MAX).into_iter().filter(|found| found.effect.leaves_all_to_nccl());
    let off = (parsed.startup.windlass == config::Switch::Off).then(|| WINDLASS_OFF.to_owned());
    let stopping: Vec<String> = stopping.map(|found| found.to_string()).chain(off).collect();
    for complaint in parsed.complaints.iter().chain(&parsed.removed).chain(&table).chain(&stopping) {
        text::tell(format_args!("windlass: warning: {complaint}\n"));
    }
}

fn act(action: Action) -> Result<u8> {
    if matches!(
        action,
        Action::Run(_) | Action::Demo(_) | Action::Bench(_) | Action::Compare(_) | Action::Tune(_)
    ) {
        complain();
    }
    match action {
        Action::Run(options) => run::run(&options),
        Action::Doctor(options) => doctor::run(&options),
        Action::Demo(options) => demo::run(&options).map(|passed| u8::from(!passed)),
        Action::Bench(options) => bench::run(&options).map(|()| 0),
        Action::Compare(options) => compare::run(&options),
        Action::Tune(options) => tune::run(&options).map(|()| 0),
        Action::Hang(options) => hang::run(&options),
        Action::Stats(options) => stats::run(&options).map(|()| 0),
        Action::Explain(options) => explain::run(&options).map(|()| 0),
        Action::Options(options) => options::run(&options).map(|()| 0),
        Action::Completions(options) => manual::completions(&options).map(|()| 0),
        Action::Manual(options) => manual::write(&options).map(|()| 0),
        Action::BenchRank => bench::work().map(|()| 0),
        Action::LimitsRank => bench::adaptive::work().map(|()| 0),
        Action::DemoRank => demo::work().map(|()| 0),
        Action::Ask { question } => answering::answer(question).map(|()| 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest sentence of a help text, in words, as on the pages.
    const SENTENCE_WORDS_MAX: usize = 35;

    /// Every text of a command's help and of those below it, with its owner.
    fn texts(command: &clap::Command) -> Vec<(String, String)> {
        let name = command.get_name().to_owned();
        let abouts = [command.get_about(), command.get_after_help()].into_iter().flatten();
        let mut found: Vec<_> = abouts.map(|text| (name.clone(), text.to_string())).collect();
        for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
            let owner = format!("{name} {}", argument.get_id());
            found.push((owner.clone(), argument.get_help().map(ToString::to_string).unwrap_or_default()));
            for value in argument.get_possible_values() {
                found.extend(value.get_help().map(|help| (owner.clone(), help.to_string())));
            }
        }
        found.extend(command.get_subcommands().filter(|command| !command.is_hide_set()).flat_map(texts));
        found
    }

    /// Every option has a help text, and its sentences can be read at once.
    #[test]
    fn help_is_short() {
        let texts = texts(&Command::command());
        assert!(texts.len() > 50, "only {} texts", texts.len());
        for (owner, text) in texts {
            assert!(!text.is_empty(), "{owner} has no help");
            for sentence in text.replace(['?', ';', ':', '\n'], ". ").split(". ") {
                let words = sentence.split_whitespace().count();
                assert!(words <= SENTENCE_WORDS_MAX, "{owner}: {words} words: {sentence}");
            }
        }
    }
}
