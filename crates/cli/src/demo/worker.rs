//! One rank of the demo.

use super::session::Session;
use super::{Job, Outcome, steps};
use crate::gpu::Gpu;
use crate::nccl::{Nccl, id_bytes, id_from_bytes, version_text};
use crate::ranks::{self, Channel};
use anyhow::Result;
use nccl_sys::types::ncclUniqueId;

/// The hidden subcommand: a rank that talks to its parent over standard input.
pub fn work() -> Result<()> {
    ranks::work(rank)
}

fn rank(channel: &mut Channel, job: Job) -> Result<Outcome> {
    let gpu = Gpu::open(job.rank)?;
    let nccl = Nccl::open(&job.windlass)?;
    channel.progress(format!("device {}, NCCL {}", gpu.name()?, version_text(nccl.version())))?;
    let mut session = Session::new(&gpu, &nccl, channel)?;
    let id = shared_id(&mut session, job.rank)?;
    let world = session.join(id, job.rank, job.ranks)?;
    steps::all(&mut session, world)?;
    session.destroy(world)?;
    let Session { passed, failures, counters, .. } = session;
    Ok(Outcome { passed, failures, counters })
}

/// A new id, made by rank 0; all ranks must call.
pub fn shared_id(session: &mut Session, rank: usize) -> Result<ncclUniqueId> {
    let mut own = Vec::new();
    if rank == 0 {
        session.counters.add("ncclGetUniqueId", 0);
        own = id_bytes(&session.nccl.unique_id()?);
    }
    id_from_bytes(&session.channel.share_first(&own)?)
}
