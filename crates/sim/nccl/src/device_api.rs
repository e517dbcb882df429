//! Host functions of NCCL's device API: teams are given, device communicators are refused, for there is no device.

use crate::communicator::{Communicator, find};
use crate::refusal::{Outcome, refuse};
use nccl_sys::*;
use std::sync::Arc;

/// `ncclTeam_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Team {
    pub ranks: i32,
    pub rank: i32,
    pub stride: i32,
}

/// `ncclDevResourceRequirements_t`.
#[repr(C)]
pub struct ResourceRequirements {
    next: *mut ResourceRequirements,
    buffer_bytes: usize,
    buffer_alignment: usize,
    buffer_handle: *mut u32,
    gin_signals: i32,
    gin_counters: i32,
    gin_signal_start: *mut u32,
    gin_counter_start: *mut u32,
}

/// `ncclLsaBarrierHandle_t` and `ncclLLA2AHandle_t`: a buffer and a number.
#[repr(C)]
pub struct ResourceHandle {
    buffer: u32,
    number: u32,
}

/// All ranks of the host are one team for loads and stores.
pub fn team_world(handle: ncclComm_t) -> Team {
    with(handle, |communicator| Team {
        ranks: communicator.ranks as i32,
        rank: communicator.rank as i32,
        stride: 1,
    })
}

/// Each rank is alone on its rail.
pub fn team_rail(handle: ncclComm_t) -> Team {
    with(handle, |communicator| Team { ranks: 1, rank: 0, stride: communicator.ranks as i32 })
}

fn with(handle: ncclComm_t, team: impl FnOnce(&Arc<Communicator>) -> Team) -> Team {
    find(handle, "ncclTeam").map_or(Team::default(), |communicator| team(&communicator))
}

pub fn rank_in_world(handle: ncclComm_t, team: Team, rank: i32) -> i32 {
    find(handle, "ncclTeamRankToWorld")
        .map_or(-1, |communicator| communicator.rank as i32 + (rank - team.rank) * team.stride)
}

/// # Safety
/// Both outputs must be writable.
pub unsafe fn require(
    handle: *mut ResourceHandle,
    requirements: *mut ResourceRequirements,
    number: i32,
    bytes: usize,
    alignment: usize,
) -> Outcome {
    if handle.is_null() || requirements.is_null() {
        return refuse(ncclInvalidArgument, "a null output of a requirement");
    }
    // SAFETY: by contract.
    unsafe {
        (*handle).number = number as u32;
        let mut empty: ResourceRequirements = std::mem::zeroed();
        empty.buffer_bytes = bytes;
        empty.buffer_alignment = alignment;
        empty.buffer_handle = &raw mut (*handle).buffer;
        requirements.write(empty);
    }
    Ok(())
}

pub fn no_device<T>(name: &str) -> Outcome<T> {
    refuse(ncclInvalidUsage, format!("{name}: the simulator has no device that could use it"))
}
