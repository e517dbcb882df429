//! Runs scenarios over both simulators, with ranks as threads of one process or as processes.
//!
//! A test starts its own binary again with the name of a scenario; the child process runs it for its ranks.
#![allow(dead_code, reason = "every test file uses its part")]

pub mod cuda;
pub mod nccl;

use libloading::os::unix::Library;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::Barrier;

pub use cuda::Cuda;
pub use nccl::*;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Ranks {
    Threads(usize),
    Processes(usize),
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    pub status: Option<i32>,
    pub stderr: String,
}

/// One rank of a scenario, on its own thread, device and stream.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub comm: Comm,
    pub stream: usize,
    pub cuda: &'static Cuda,
    pub nccl: &'static Nccl,
    /// A barrier of the ranks of this process.
    pub local: Arc<Barrier>,
    pub id: [u8; 128],
    /// A second id, for another communicator.
    pub other_id: [u8; 128],
}

pub type Scenario = (&'static str, fn(&mut Rank));

/// Runs a scenario and expects every process to succeed.
pub fn expect_success(scenario: &str, ranks: Ranks) {
    for ended in run(scenario, ranks, &[]) {
        assert_eq!(ended.status, Some(0), "{scenario} {ranks:?}: {}", ended.stderr);
    }
}

/// Runs a scenario and expects every process to end with status 86, and all `texts` on their stderr.
pub fn expect_failure(scenario: &str, ranks: Ranks, environment: &[(&str, &str)], texts: &[&str]) {
    let ended = run(scenario, ranks, environment);
    let said: String = ended.iter().map(|ended| ended.stderr.as_str()).collect();
    for text in texts {
        assert!(said.contains(text), "{scenario} {ranks:?}: no \"{text}\" in:\n{said}");
    }
    for ended in &ended {
        assert_eq!(ended.status, Some(86), "{scenario} {ranks:?}:\n{said}");
    }
}

pub fn run(scenario: &str, ranks: Ranks, environment: &[(&str, &str)]) -> Vec<Ended> {
    let children: Vec<Child> = match ranks {
        Ranks::Threads(count) => {
            let ids = fresh_ids();
            vec![spawn(scenario, &ids, 0, count, count, environment)]
        }
        Ranks::Processes(count) => {
            let ids = fresh_ids();
            (0..count).map(|rank| spawn(scenario, &ids, rank, 1, count, environment)).collect()
        }
    };
    children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().expect("the child ran");
            Ended {
                status: output.status.code(),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            }
        })
        .collect()
}

/// Makes two ids in this process, which has no rank.
fn fresh_ids() -> String {
    let library = unsafe { Library::new(libraries().join("libnccl.so.2")) }.expect("the simulator loads");
    let make = unsafe { library.get::<MakeId>(b"ncclGetUniqueId\0") }.expect("ncclGetUniqueId");
    let mut ids = [UniqueId([0; 128]), UniqueId([0; 128])];
    ids.iter_mut().for_each(|id| assert_eq!(unsafe { make(id) }, SUCCESS));
    ids.iter().flat_map(|id| id.0).map(|byte| format!("{byte:02x}")).collect()
}

type MakeId = unsafe extern "C" fn(*mut UniqueId) -> i32;

fn spawn(
    scenario: &str,
    ids: &str,
    first: usize,
    count: usize,
    ranks: usize,
    environment: &[(&str, &str)],
) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
        .env("LD_LIBRARY_PATH", libraries())
        .env("SCENARIO", scenario)
        .env("SCENARIO_IDS", ids)
        .env("SCENARIO_RANKS", format!("{first} {count} {ranks}"))
        .env_remove("WINDLASS_SIM_STRICT")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.spawn().expect("this binary starts")
}

/// A folder with the simulators under the names that programs load.
pub fn libraries() -> PathBuf {
    // Cargo puts the tests' dependencies beside this binary; the copies one folder up are those of the last `cargo build`.
    let executable = std::env::current_exe().expect("this binary");
    let built = executable.parent().expect("target/PROFILE/deps/BINARY").to_owned();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("libraries");
    std::fs::create_dir_all(&folder).expect("a folder in the target directory");
    for (name, file) in [("libnccl.so.2", "libsim_nccl.so"), ("libcuda.so.1", "libsim_cuda.so")] {
        let target = built.join(file);
        if !target.exists() {
            let package = if file == "libsim_cuda.so" { "sim-cuda" } else { "sim-nccl" };
            let mut build = Command::new(env!("CARGO"));
            build.args(["build", "-p", package]);
            if built.ends_with("release/deps") {
                build.arg("--release");
            }
            assert!(build.status().is_ok_and(|status| status.success()), "cargo build -p {package}");
        }
        let link = folder.join(name);
        if std::fs::read_link(&link).ok().as_ref() != Some(&target) {
            // Tests run side by side: make the link elsewhere and move it into place.
            let fresh = folder.join(format!("{name}.{}", std::process::id()));
            let _ = std::fs::remove_file(&fresh);
            std::os::unix::fs::symlink(&target, &fresh).expect("a link");
            std::fs::rename(&fresh, &link).expect("a link in place");
        }
    }
    folder
}

/// Runs the scenario that a test has started; `#[test] #[ignore] fn child()` of every test file calls it.
pub fn child(scenarios: &[Scenario]) {
    let name = std::env::var("SCENARIO").expect("started by a test");
    let (_, body) = scenarios.iter().find(|(known, _)| *known == name).expect("a known scenario");
    let body = *body;
    let text = std::env::var("SCENARIO_RANKS").expect("started by a test");
    let numbers: Vec<usize> = text.split(' ').map(|number| number.parse().expect("a number")).collect();
    let (first, count, ranks) = (numbers[0], numbers[1], numbers[2]);
    let text = std::env::var("SCENARIO_IDS").expect("started by a test");
    let [id, other_id]: [[u8; 128]; 2] = std::array::from_fn(|which| {
        std::array::from_fn(|index| {
            let digits = 2 * (128 * which + index);
            u8::from_str_radix(&text[digits..digits + 2], 16).expect("hexadecimal")
        })
    });
    let (cuda, nccl) = (Cuda::open(), Nccl::open());
    let local = Arc::new(Barrier::new(count));
    let threads: Vec<_> = (first..first + count)
        .map(|rank| {
            let local = local.clone();
            std::thread::spawn(move || {
                cuda.use_device(rank as i32);
                let stream = cuda.stream();
                let comm = Comm(0);
                let mut rank = Rank { rank, ranks, comm, stream, cuda, nccl, local, id, other_id };
                body(&mut rank);
            })
        })
        .collect();
    let failed = threads.into_iter().map(|thread| thread.join()).filter(Result::is_err).count();
    std::process::exit(if failed == 0 { 0 } else { 1 });
}

impl Rank {
    pub fn join(&mut self) {
        self.comm = self.nccl.init_rank(self.ranks, self.id, self.rank).expect("init");
    }

    /// Waits for the stream, then destroys the communicator.
    pub fn leave(&mut self) {
        self.cuda.synchronize(self.stream);
        assert_eq!(self.nccl.destroy(self.comm), SUCCESS);
    }

    pub fn synchronize(&self) {
        self.cuda.synchronize(self.stream);
    }

    /// Allocates device memory that holds `values`.
    pub fn upload<T: Copy>(&self, values: &[T]) -> usize {
        let address = self.cuda.allocate(size_of_val(values).max(1));
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), address as *mut T, values.len()) };
        address
    }

    /// Waits for the stream, then gives the content of device memory.
    pub fn download<T: Copy + Default>(&self, address: usize, count: usize) -> Vec<T> {
        self.synchronize();
        let mut values = vec![T::default(); count];
        unsafe { std::ptr::copy_nonoverlapping(address as *const T, values.as_mut_ptr(), count) };
        values
    }

    pub fn all_reduce(&self, send: usize, receive: usize, count: usize) -> i32 {
        unsafe { (self.nccl.all_reduce)(send, receive, count, FLOAT32, SUM, self.comm, self.stream) }
    }

    pub fn send(&self, buffer: usize, bytes: usize, peer: usize) -> i32 {
        unsafe { (self.nccl.send)(buffer, bytes, INT8, peer as i32, self.comm, self.stream) }
    }

    pub fn recv(&self, buffer: usize, bytes: usize, peer: usize) -> i32 {
        unsafe { (self.nccl.recv)(buffer, bytes, INT8, peer as i32, self.comm, self.stream) }
    }
}
