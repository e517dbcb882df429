//! A small all-gather of host data between the ranks, for what NCCL does over its bootstrap network: splits and windows.

use crate::segment::{EXCHANGE_BYTES, Left, Segment};
use crate::strict;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// One rank's data: the call that it is in, and numbers of that call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Note {
    pub kind: u64,
    pub values: [i64; 5],
}

pub const SPLIT: u64 = 1;
pub const WINDOW_REGISTER: u64 = 2;
pub const DEVICE_COMMUNICATOR: u64 = 3;
pub const FIRST_WINDOW: u64 = 4;
pub const WINDOW_MAPPED: u64 = 5;

fn kind_name(kind: u64) -> &'static str {
    match kind {
        SPLIT => "ncclCommSplit",
        WINDOW_REGISTER => "ncclCommWindowRegister",
        DEVICE_COMMUNICATOR => "ncclDevCommCreate",
        FIRST_WINDOW => "ncclCommWindowRegister, the first",
        WINDOW_MAPPED => "ncclCommWindowRegister, mapped",
        _ => "an unknown call",
    }
}

/// Sends this rank's note to all ranks and returns all notes, in rank order. Waits for all ranks. Ends the process if ranks are in
/// different calls.
pub fn exchange(segment: &Segment, rank: usize, note: Note, leave: &AtomicBool) -> Result<Vec<Note>, Left> {
    let ranks = segment.ranks();
    let mine = segment.rank(rank);
    let turn = mine.exchanged.load(SeqCst);
    let parity = (turn & 1) as usize;
    let name = kind_name(note.kind);
    mine.call.set(&format!("{name} {:?}", note.values));
    let peers_read = || (0..ranks).all(|peer| segment.rank(peer).exchange_read.load(SeqCst) + 1 >= turn);
    segment.wait(rank, leave, || format!("peers to leave an earlier {name}"), peers_read)?;
    const _: () = assert!(size_of::<Note>() <= EXCHANGE_BYTES);
    // SAFETY: the cell is this rank's, large enough, and peers have read what it held two turns ago.
    unsafe { mine.notes[parity].get().cast::<Note>().write(note) };
    mine.exchanged.store(turn + 1, SeqCst);
    segment.ring_all();
    let peers_wrote = || (0..ranks).all(|peer| segment.rank(peer).exchanged.load(SeqCst) > turn);
    let missing = || {
        let late = (0..ranks).filter(|&peer| segment.rank(peer).exchanged.load(SeqCst) <= turn);
        format!("rank {} to call {name}", late.map(|peer| peer.to_string()).collect::<Vec<_>>().join(", "))
    };
    segment.wait(rank, leave, missing, peers_wrote)?;
    // SAFETY: every peer has written its cell for this turn and writes it again only after this rank has read.
    let read = |peer| unsafe { segment.rank(peer).notes[parity].get().cast::<Note>().read() };
    let notes: Vec<Note> = (0..ranks).map(read).collect();
    mine.exchange_read.store(turn + 1, SeqCst);
    segment.ring_all();
    mine.call.set("");
    if let Some(peer) = (0..ranks).find(|&peer| notes[peer].kind != note.kind) {
        let other = kind_name(notes[peer].kind);
        strict::fail(segment, rank, &[format!("mismatched calls: rank {rank} {name}, rank {peer} {other}")]);
    }
    Ok(notes)
}
