//! One process, a thread for each GPU: every rank gives a row, and every rank ends with all rows.
//!
//! ```text
//! cargo build --release        # RUSTFLAGS="-L DIR" where libnccl.so.2 lies in no folder of the linker
//! windlass run -- target/release/all_gather [--ranks N]
//! ```
//!
//! Nothing here is Windlass's own: the program is written for NCCL.
//!
//! Did it work? It prints `0 wrong`. With `WINDLASS_REPORT=text` each communicator has one line for its calls; path `native` says
//! that Windlass's kernel ran them. Rows are so small that they are native everywhere. The words in front are no part of the line:
//!
//! ```text
//! on the simulator, 2 GPUs: ncclAllGather native 3 6.0 KiB
//! on 2 GPUs joined by NVLink: ncclAllGather native 3 6.0 KiB
//! ```
//!
//! `windlass stats` shows the same of programs that still run.

mod cuda;
mod nccl;

use cuda::{Buffer, Gpu};
use nccl::{Communicator, must};
use std::process::ExitCode;
use std::ptr::{null, null_mut};
use std::thread;

/// Numbers of a row, and how often all rows are gathered.
const ROW: usize = 256;
const ROUNDS: usize = 3;

/// What a thread gets.
struct Rank {
    number: usize,
    communicator: Communicator,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time; each is given to one thread.
unsafe impl Send for Rank {}

fn main() -> ExitCode {
    let ranks = match ranks() {
        Ok(ranks) => ranks,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let mut communicators = vec![null_mut(); ranks];
    // SAFETY: there is room for that many communicators; no list of devices means the first ones.
    unsafe {
        must(nccl::ncclCommInitAll(communicators.as_mut_ptr(), ranks as i32, null()), "ncclCommInitAll")
    };
    let threads: Vec<_> = (communicators.into_iter().enumerate())
        .map(|(number, communicator)| Rank { number, communicator })
        .map(|rank| thread::spawn(move || gather(rank, ranks)))
        .collect();
    let wrong: usize = threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).sum();
    println!("all-gather over {ranks} GPUs: {wrong} wrong");
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One for each GPU, or as many as `--ranks` says.
fn ranks() -> Result<usize, String> {
    const USAGE: &str = "usage: all_gather [--ranks N]";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let wanted = match arguments.as_slice() {
        [] => None,
        [option, number] if option == "--ranks" => Some(number.parse::<usize>().map_err(|_| USAGE)?),
        _ => return Err(USAGE.into()),
    };
    let devices = cuda::count_devices();
    match wanted.unwrap_or(devices) {
        0 => Err("no ranks: a GPU is needed for each".into()),
        ranks if ranks > devices => Err(format!("{ranks} ranks, but {devices} GPUs")),
        ranks => Ok(ranks),
    }
}

/// Gathers all ranks' rows, again and again, and counts wrong numbers.
fn gather(rank: Rank, ranks: usize) -> usize {
    let gpu = Gpu::take(rank.number);
    let (row, all) = (Buffer::new(ROW), Buffer::new(ROW * ranks));
    let mut wrong = 0;
    for round in 0..ROUNDS {
        row.write(&gpu, &row_of(rank.number, round));
        // SAFETY: `all` has room for a row of every rank, and both buffers live until the stream was waited for.
        unsafe {
            must(
                nccl::ncclAllGather(
                    row.pointer(),
                    all.pointer(),
                    ROW,
                    nccl::FLOAT32,
                    rank.communicator,
                    gpu.stream(),
                ),
                "ncclAllGather",
            )
        };
        let expected = (0..ranks).flat_map(|other| row_of(other, round));
        wrong += all.read(&gpu).into_iter().zip(expected).filter(|(seen, right)| seen != right).count();
    }
    // SAFETY: nothing of this communicator runs any more.
    unsafe { must(nccl::ncclCommDestroy(rank.communicator), "ncclCommDestroy") };
    wrong
}

/// What a rank gives in a round.
fn row_of(rank: usize, round: usize) -> Vec<f32> {
    (0..ROW).map(|column| (1000 * rank + 100 * round + column % 7) as f32).collect()
}
