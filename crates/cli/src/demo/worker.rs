//! One rank of the demo.

use super::session::Session;
use super::{Job, Outcome, steps};
use crate::gpu::Gpu;
use crate::nccl::{Nccl, version_text};
use crate::ranks::{self, Channel};
use anyhow::Result;

/// The hidden subcommand: a rank that talks to its parent over standard input.
pub fn work() -> Result<()> {
    ranks::work(rank)
}

fn rank(channel: &mut Channel, job: Job) -> Result<Outcome> {
    let gpu = Gpu::open(job.rank)?;
    let nccl = Nccl::open(&job.windlass)?;
    channel.progress(&format!("device {}, NCCL {}", gpu.name()?, version_text(nccl.version)))?;
    let mut session = Session::new(&gpu, &nccl, channel)?;
    let id = session.shared_id(job.rank)?;
    let world = session.join(id, job.rank, job.ranks)?;
    steps::all(&mut session, world)?;
    session.destroy(world)?;
    let Session { passed, failures, made, .. } = session;
    Ok(Outcome { passed, failures, made })
}
