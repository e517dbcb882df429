//! The `windlass` command.

// Patterns name NCCL's own constants.
#![allow(non_upper_case_globals)]

mod answering;
mod asking;
mod bench;
mod built;
mod collective;
mod counts;
mod demo;
mod doctor;
mod element;
mod elf;
mod gpu;
mod installation;
mod machine;
mod nccl;
mod nvml;
mod program;
mod ranks;
mod run;
mod script;
mod search;
mod stats;
mod text;
mod tune;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Hidden subcommands that run a rank.
const DEMO_RANK: &str = "demo-rank";
const BENCH_RANK: &str = "bench-rank";

/// A drop-in for libnccl.so.2: run programs over it, look at it, measure it.
#[derive(Parser)]
#[command(name = "windlass", version, long_version = built::long_version(), max_term_width = 100)]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Run a command over Windlass
    Run(run::Options),
    /// Show what would load, what this machine can do, and what stands in the way
    Doctor(doctor::Options),
    /// Run collectives, send/recv and groups on several ranks, check all data and Windlass's counters
    Demo(demo::Options),
    /// Time the real library alone against the same calls through Windlass
    Bench(bench::Options),
    /// Measure up to which sizes Windlass's collectives beat NCCL's here, and write that down for WINDLASS_TUNING
    Tune(tune::Options),
    /// Show what running programs have counted
    Stats(stats::Options),
    #[command(name = BENCH_RANK, hide = true)]
    BenchRank,
    #[command(name = DEMO_RANK, hide = true)]
    DemoRank,
    #[command(name = asking::SUBCOMMAND, hide = true)]
    Ask {
        #[command(subcommand)]
        question: answering::Question,
    },
}

fn main() -> ExitCode {
    match act(Command::parse().action) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("windlass: {error:#}");
            ExitCode::from(1)
        }
    }
}

fn act(action: Action) -> Result<u8> {
    match action {
        Action::Run(options) => run::run(&options),
        Action::Doctor(options) => doctor::run(&options),
        Action::Demo(options) => demo::run(&options).map(|passed| u8::from(!passed)),
        Action::Bench(options) => bench::run(&options).map(|()| 0),
        Action::Tune(options) => tune::run(&options).map(|()| 0),
        Action::Stats(options) => stats::run(&options).map(|()| 0),
        Action::BenchRank => bench::work().map(|()| 0),
        Action::DemoRank => demo::work().map(|()| 0),
        Action::Ask { question } => answering::answer(question).map(|()| 0),
    }
}
