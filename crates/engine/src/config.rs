//! What the environment says of options.
//!
//! Only this file reads the environment; it is read once, when the first call comes. The options are those of the one [table](OPTIONS).

mod nccl_files;

mod table;

mod words;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use once_cell::sync::OnceCell;

pub use table::{Description, OPTIONS};
use words::{
    batch, bytes, bytes_or_none, fast, lazy, level, number, path, pool, register, report, switch, windows,
};

/// Variables with this prefix belong to the stand-ins of the tests.
const STAND_IN_PREFIX: &str = "WINDLASS_SIM_";

/// How a report at exit is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A table for people.
    Text,
    /// One JSON object.
    Json,
}

/// A report that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// How it is written.
    pub form: Form,
    /// The file, or standard error.
    pub file: Option<PathBuf>,
}

/// A switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Switch {
    On,
    Off,
}

/// Which communicators are promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Lazy {
    Pairs,
    All,
    Off,
}

/// Whether buffers are registered with NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Register {
    Auto,
    On,
    Off,
}

/// Whether windows stay when they are deregistered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Windows {
    Direct,
    Keep,
    Off,
}

/// Which collectives of a group one kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Batch {
    Off,
    Small,
    All,
}

/// Whether kernels of ours run collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Fast {
    Auto,
    Off,
}

/// What the environment says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Config {
    pub windlass: Switch,
    pub log: ::log::LevelFilter,
    pub log_file: Option<PathBuf>,
    pub report: Option<Report>,
    pub stats: Switch,
    pub nvtx: Switch,
    pub fabric: Switch,
    pub lazy: Lazy,
    pub warm: Switch,
    pub parked_bytes_max: u64,
    pub meetings_max: usize,
    pub arena_bytes_max: u64,
    /// 0 where it is off.
    pub pool_bytes_max: u64,
    pub register: Register,
    pub fast: Fast,
    pub batch: Batch,
    pub tuning: Option<PathBuf>,
    pub staging_bytes_max: u64,
    pub windows: Windows,
    pub check: Switch,
    pub stuck_after: Duration,
    pub nccl: Nccl,
}

/// What NCCL's own variables say about births, in the environment or [its files](nccl_files).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nccl {
    /// NCCL_COMM_ID: whether every rank makes its own id.
    pub comm_id: Switch,
    /// NCCL_COMM_BLOCKING: whether inits wait where their configuration does not say.
    pub blocking: Switch,
    /// Whether NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and NCCL_CUMEM_ENABLE allow what a fabric does.
    pub peer_access: Switch,
    /// Whether NCCL_LAUNCH_MODE and NCCL_LAUNCH_ORDER_IMPLICIT leave a rank's launches to itself: with GROUP one waits for those of all
    /// ranks of its process, with an implicit order launches of two threads refuse each other.
    pub launches_alone: Switch,
    /// NCCL_NVLS_ENABLE: whether NCCL may use multicast, where devices have it.
    pub multicast: Switch,
    /// Whether NCCL_LOCAL_REGISTER and NCCL_P2P_USE_CUDA_MEMCPY leave registered buffers their use.
    pub registration: Switch,
    /// Whether NCCL_ALGO, NCCL_PROTO and NCCL_CTA_POLICY leave the choice of an algorithm to who knows best.
    pub choice: Switch,
    /// NCCL_WIN_ENABLE: whether NCCL makes windows. Where not, it waits for no other rank.
    pub windows: Switch,
    /// NCCL_COMM_SPLIT_SHARE_RESOURCES, NCCL_COMM_SHRINK_SHARE_RESOURCES: whether communicators made from others use theirs.
    pub shares: Switch,
    /// NCCL_GRAPH_MIXING_SUPPORT: whether NCCL orders operations of graphs and eager ones against each other.
    pub mixes_graphs: Switch,
    /// NCCL_MAX_CTAS: the most blocks of a kernel, 0 for no limit.
    pub ctas_max: u32,
}

/// Enough for 64 communicators of 8 ranks, whose rings need 4.8 GiB before they grow. It is a
/// limit: a communicator of two ranks costs 23 MiB until it sends more.
const ARENA_BYTES_MAX: u64 = 8 << 30;

impl Default for Config {
    fn default() -> Config {
        Config {
            windlass: Switch::On,
            log: ::log::LevelFilter::Error,
            log_file: None,
            report: None,
            stats: Switch::On,
            nvtx: Switch::Off,
            fabric: Switch::On,
            lazy: Lazy::Pairs,
            warm: Switch::On,
            parked_bytes_max: 1 << 30,
            meetings_max: 1024,
            arena_bytes_max: ARENA_BYTES_MAX,
            pool_bytes_max: 2 << 30,
            register: Register::Auto,
            fast: Fast::Auto,
            batch: Batch::All,
            tuning: None,
            staging_bytes_max: 512 << 20,
            windows: Windows::Keep,
            check: Switch::Off,
            stuck_after: Duration::from_secs(60),
            nccl: Nccl {
                comm_id: Switch::Off,
                blocking: Switch::On,
                peer_access: Switch::On,
                launches_alone: Switch::On,
                shares: Switch::Off,
                multicast: Switch::On,
                registration: Switch::On,
                choice: Switch::On,
                windows: Switch::On,
                mixes_graphs: Switch::On,
                ctas_max: 0,
            },
        }
    }
}

static CONFIG: OnceCell<(Config, Vec<String>)> = OnceCell::new();

/// The options of this process, read at the first call.
pub fn config() -> &'static Config {
    &read().0
}

/// What is wrong with the options, one sentence each.
pub fn complaints() -> &'static [String] {
    &read().1
}

fn read() -> &'static (Config, Vec<String>) {
    CONFIG.get_or_init(|| {
        let (mut config, complaints) = parse(std::env::vars_os());
        // Only fabrics go by NCCL's own variables.
        if config.fabric == Switch::On {
            let files = nccl_files::files(std::env::var_os("NCCL_CONF_FILE").map(PathBuf::from), home);
            let texts: Vec<String> = files.iter().map(|file| nccl_files::read(file)).collect();
            let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
            config.nccl.read_files(names.collect(), &texts);
        }
        (config, complaints)
    })
}

/// As NCCL has it; of users who are not in the file, as the environment has it.
fn home() -> Option<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    nccl_files::home_of(user, &users).or_else(std::env::home_dir)
}

/// Reads options from variables. A value that cannot be read leaves the default, and says so.
pub fn parse(variables: impl Iterator<Item = (OsString, OsString)>) -> (Config, Vec<String>) {
    let mut config = Config::default();
    let mut complaints = Vec::new();
    let mut says_log = false;
    for (name, value) in variables {
        if let Some(name) = name.to_str().filter(|name| name.starts_with("NCCL_")) {
            config.nccl.read(name, &value.to_string_lossy());
        }
        let Some(name) = name.to_str().filter(|name| *name == "WINDLASS" || name.starts_with("WINDLASS_"))
        else {
            continue;
        };
        let text = value.to_string_lossy();
        let outcome = match name {
            "WINDLASS" => switch(&text).map(|value| config.windlass = value),
            "WINDLASS_LOG" => {
                says_log = true;
                level(&text).map(|value| config.log = value)
            }
            "WINDLASS_LOG_FILE" => {
                config.log_file = path(&text);
                Some(())
            }
            "WINDLASS_REPORT" => report(&text).map(|value| config.report = value),
            "WINDLASS_STATS" => switch(&text).map(|value| config.stats = value),
            "WINDLASS_MEETINGS_MAX" => text.parse().ok().map(|value| config.meetings_max = value),
            "WINDLASS_FABRIC" => switch(&text).map(|value| config.fabric = value),
            "WINDLASS_LAZY" => lazy(&text).map(|value| config.lazy = value),
            "WINDLASS_WARM" => switch(&text).map(|value| config.warm = value),
            "WINDLASS_PARK" => bytes_or_none(&text).map(|value| config.parked_bytes_max = value),
            "WINDLASS_NVTX" => switch(&text).map(|value| config.nvtx = value),
            "WINDLASS_STUCK_AFTER" => {
                text.parse().ok().map(|seconds| config.stuck_after = Duration::from_secs(seconds))
            }
            "WINDLASS_ARENA_MAX" => bytes(&text).map(|value| config.arena_bytes_max = value),
            "WINDLASS_POOL" => pool(&text).map(|value| config.pool_bytes_max = value),
            "WINDLASS_REGISTER" => register(&text).map(|value| config.register = value),
            "WINDLASS_FAST" => fast(&text).map(|value| config.fast = value),
            "WINDLASS_BATCH" => batch(&text).map(|value| config.batch = value),
            "WINDLASS_TUNING" => {
                config.tuning = path(&text);
                Some(())
            }
            "WINDLASS_STAGING_MAX" => bytes(&text).map(|value| config.staging_bytes_max = value),
            "WINDLASS_WINDOWS" => windows(&text).map(|value| config.windows = value),
            "WINDLASS_CHECK" => switch(&text).map(|value| config.check = value),
            // Read where the real library is searched for; and the stand-ins' own.
            "WINDLASS_NCCL" | "WINDLASS_LIBRARY" => Some(()),
            _ if name.starts_with(STAND_IN_PREFIX) => Some(()),
            _ => {
                complaints.push(format!("{name} is no option; the nearest is {}", nearest(name)));
                Some(())
            }
        };
        if outcome.is_none() {
            complaints.push(format!("{name} is \"{text}\", expected one of: {}", values_of(name)));
        }
    }
    // Its warnings are what it is for.
    if config.check == Switch::On && !says_log {
        config.log = ::log::LevelFilter::Warn;
    }
    (config, complaints)
}

impl Nccl {
    /// What files say of variables that are not set: an empty one is. The first to say it counts.
    fn read_files(&mut self, mut set: BTreeSet<String>, texts: &[String]) {
        for (name, value) in texts.iter().flat_map(|text| nccl_files::variables(text)) {
            if set.insert(name.to_owned()) {
                self.read(name, value);
            }
        }
    }

    /// As NCCL reads them: a number, or nothing.
    fn read(&mut self, name: &str, text: &str) {
        if text.is_empty() {
            return;
        }
        match (name, number(text)) {
            ("NCCL_COMM_ID", _) => self.comm_id = Switch::On,
            ("NCCL_COMM_BLOCKING", 0) => self.blocking = Switch::Off,
            ("NCCL_P2P_DISABLE", 1) | ("NCCL_CUMEM_ENABLE", 0) => self.peer_access = Switch::Off,
            ("NCCL_P2P_LEVEL", 0) if text == "LOC" || text.trim_start().starts_with('0') => {
                self.peer_access = Switch::Off;
            }
            ("NCCL_LAUNCH_MODE", _) if text == "GROUP" => self.launches_alone = Switch::Off,
            ("NCCL_LAUNCH_ORDER_IMPLICIT", implicit) if implicit != 0 => self.launches_alone = Switch::Off,
            ("NCCL_NVLS_ENABLE", 0) => self.multicast = Switch::Off,
            ("NCCL_GRAPH_MIXING_SUPPORT", 0) => self.mixes_graphs = Switch::Off,
            ("NCCL_WIN_ENABLE", 0) => self.windows = Switch::Off,
            ("NCCL_LOCAL_REGISTER", 0) => self.registration = Switch::Off,
            ("NCCL_ALGO" | "NCCL_PROTO", _) => self.choice = Switch::Off,
            ("NCCL_CTA_POLICY", policy) if policy != 0 => self.choice = Switch::Off,
            ("NCCL_P2P_USE_CUDA_MEMCPY", copies) if copies != 0 => self.registration = Switch::Off,
            ("NCCL_COMM_SPLIT_SHARE_RESOURCES" | "NCCL_COMM_SHRINK_SHARE_RESOURCES", shares)
                if shares != 0 =>
            {
                self.shares = Switch::On;
            }
            ("NCCL_MAX_CTAS", most) => self.ctas_max = u32::try_from(most).unwrap_or(0),
            _ => {}
        }
    }
}

fn nearest(name: &str) -> &'static str {
    OPTIONS
        .iter()
        .map(|option| option.name)
        .min_by_key(|known| strsim::levenshtein(known, name))
        .unwrap_or_default()
}

fn values_of(name: &str) -> &'static str {
    OPTIONS.iter().find(|option| option.name == name).map_or("", |option| option.values)
}

/// Replaces `%h` by the host's name and `%p` by the process id, as `NCCL_DEBUG_FILE` has it.
pub fn expand_file_name(name: &std::path::Path) -> PathBuf {
    let text = name.to_string_lossy();
    if !text.contains('%') {
        return name.to_owned();
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    PathBuf::from(text.replace("%h", &host).replace("%p", &std::process::id().to_string()))
}

/// The text of `docs/options.md`.
pub fn documentation() -> String {
    let rows =
        OPTIONS.iter().map(|o| format!("| `{}` | {} | {} | {} |\n", o.name, o.values, o.default, o.about));
    let head = "# Options\n\nEnvironment variables, read once at the first NCCL call. This page is made from the table in \
                `crates/engine/src/config/table.rs`.\nA value that cannot be read leaves the default; that, and a \
                `WINDLASS_` name that is none of these, is logged as a warning,\nand said by `windlass run` and \
                `windlass doctor`. (`WINDLASS_SIM_` names belong to the simulator: `crates/sim`.)\n\n| variable | values | default | what it does |\n|---|---|---|---|\n";
    head.to_owned() + &rows.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> (Config, Vec<String>) {
        parse(pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())))
    }

    /// Nothing set, and variables of others: the defaults, no complaint.
    #[test]
    fn defaults() {
        assert_eq!(
            read(&[("PATH", "/bin"), ("WINDLASSES", "2"), ("WINDLASS_SIM_DEVICES", "4")]),
            (Config::default(), vec![])
        );
    }

    /// Who checks reads warnings, unless the log is set.
    #[test]
    fn checks_are_heard() {
        let heard = |pairs: &[(&str, &str)]| read(pairs).0.log;
        let (check, off) = (("WINDLASS_CHECK", "on"), ("WINDLASS_LOG", "off"));
        assert_eq!(heard(&[check]), ::log::LevelFilter::Warn);
        assert_eq!(heard(&[check, off]), ::log::LevelFilter::Off);
        assert_eq!(heard(&[off, check]), ::log::LevelFilter::Off);
        assert_eq!(heard(&[("WINDLASS_CHECK", "0")]), Config::default().log);
    }

    /// Numbers as C reads them: NCCL's switches are these.
    #[test]
    fn numbers_of_nccl() {
        for (text, value) in [
            ("1", 1),
            (" 1 # why", 1),
            ("0x1f", 31),
            ("010", 8),
            ("00", 0),
            ("0x", 0),
            ("-3", -3),
            ("+7x", 7),
            ("yes", 0),
            ("", 0),
            ("99999999999999999999", i64::MAX),
        ] {
            assert_eq!(number(text), value, "{text:?}");
        }
    }

    /// Every option is read.
    #[test]
    fn values() {
        let (config, complaints) = read(&[
            ("WINDLASS", "off"),
            ("WINDLASS_LOG", "INFO"),
            ("WINDLASS_LOG_FILE", "/tmp/x.%p"),
            ("WINDLASS_REPORT", "json:/tmp/r:1"),
            ("WINDLASS_STATS", "0"),
            ("WINDLASS_NVTX", "on"),
            ("WINDLASS_FABRIC", "off"),
            ("WINDLASS_LAZY", "all"),
            ("WINDLASS_WARM", "off"),
            ("WINDLASS_PARK", "0"),
            ("NCCL_COMM_ID", "10.0.0.1:5000"),
            ("NCCL_COMM_BLOCKING", "0"),
            ("NCCL_P2P_LEVEL", "LOC"),
            ("NCCL_LAUNCH_MODE", "GROUP"),
            ("WINDLASS_MEETINGS_MAX", "7"),
            ("WINDLASS_NCCL", "/x"),
            ("WINDLASS_ARENA_MAX", "96m"),
            ("WINDLASS_POOL", "3M"),
            ("WINDLASS_REGISTER", "on"),
            ("WINDLASS_STAGING_MAX", "64M"),
            ("WINDLASS_WINDOWS", "off"),
            ("WINDLASS_CHECK", "1"),
            ("WINDLASS_FAST", "off"),
            ("WINDLASS_BATCH", "small"),
            ("WINDLASS_TUNING", "/tmp/t"),
            ("NCCL_PROTO", "LL"),
            ("NCCL_NVLS_ENABLE", "0"),
            ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"),
            ("NCCL_LOCAL_REGISTER", "0"),
            ("NCCL_WIN_ENABLE", "0"),
            ("NCCL_GRAPH_MIXING_SUPPORT", "0"),
            ("NCCL_MAX_CTAS", "12"),
            ("WINDLASS_STUCK_AFTER", "3"),
        ]);
        assert!(complaints.is_empty(), "{complaints:?}");
        let expected = Config {
            windlass: Switch::Off,
            log: ::log::LevelFilter::Info,
            log_file: Some("/tmp/x.%p".into()),
            report: Some(Report { form: Form::Json, file: Some("/tmp/r:1".into()) }),
            stats: Switch::Off,
            nvtx: Switch::On,
            fabric: Switch::Off,
            lazy: Lazy::All,
            warm: Switch::Off,
            parked_bytes_max: 0,
            meetings_max: 7,
            arena_bytes_max: 96 << 20,
            pool_bytes_max: 3 << 20,
            register: Register::On,
            fast: Fast::Off,
            batch: Batch::Small,
            tuning: Some("/tmp/t".into()),
            staging_bytes_max: 64 << 20,
            windows: Windows::Off,
            check: Switch::On,
            stuck_after: Duration::from_secs(3),
            nccl: Nccl {
                comm_id: Switch::On,
                blocking: Switch::Off,
                peer_access: Switch::Off,
                launches_alone: Switch::Off,
                shares: Switch::On,
                multicast: Switch::Off,
                registration: Switch::Off,
                choice: Switch::Off,
                windows: Switch::Off,
                mixes_graphs: Switch::Off,
                ctas_max: 12,
            },
        };
        assert_eq!(config, expected);
    }

    /// What is set in the environment, if only to nothing, stays; of files the first counts.
    #[test]
    fn files_of_nccl() {
        let pairs = [("NCCL_MAX_CTAS", "12"), ("NCCL_COMM_BLOCKING", "")];
        let mut nccl = read(&pairs).0.nccl;
        let set = pairs.iter().map(|(name, _)| (*name).to_owned()).collect();
        let users = "NCCL_MAX_CTAS=3\nNCCL_COMM_BLOCKING=0\nNCCL_P2P_LEVEL=NVL\nNCCL_COMM_ID=10.0.0.1:5000";
        let everybodys = "NCCL_P2P_LEVEL=LOC\nNCCL_CUMEM_ENABLE=0\n";
        let (on, off) = (Switch::On, Switch::Off);
        nccl.read_files(set, &[users.into(), "NCCL_P2P_LEVEL=LOC".into()]);
        assert_eq!(
            nccl,
            Nccl {
                comm_id: on,
                blocking: on,
                peer_access: on,
                launches_alone: on,
                shares: off,
                multicast: on,
                registration: on,
                choice: on,
                windows: on,
                mixes_graphs: on,
                ctas_max: 12
            }
        );
        nccl.read_files(BTreeSet::new(), &["NCCL_LAUNCH_MODE=PARALLEL\nNCCL_LAUNCH_ORDER_IMPLICIT=0".into()]);
        assert_eq!(nccl.launches_alone, on);
        nccl.read_files(BTreeSet::new(), &["NCCL_LAUNCH_ORDER_IMPLICIT=1".into()]);
        assert_eq!(nccl.launches_alone, off);
        nccl.read_files(BTreeSet::new(), &["NCCL_P2P_USE_CUDA_MEMCPY=0\nNCCL_NVLS_ENABLE=2".into()]);
        assert_eq!((nccl.registration, nccl.multicast), (on, on));
        nccl.read_files(BTreeSet::new(), &["NCCL_P2P_USE_CUDA_MEMCPY=1\nNCCL_NVLS_ENABLE=0".into()]);
        assert_eq!((nccl.registration, nccl.multicast), (off, off));
        nccl.read_files(BTreeSet::new(), &[everybodys.into()]);
        assert_eq!(nccl.peer_access, off);
    }

    /// A misspelt name gets the nearest; a bad value names what was expected, and the default stays.
    #[test]
    fn complaints_name_the_mend() {
        let (config, complaints) = read(&[("WINDLASS_LGO", "info"), ("WINDLASS_STATS", "maybe")]);
        assert_eq!(config, Config::default());
        assert_eq!(complaints[0], "WINDLASS_LGO is no option; the nearest is WINDLASS_LOG");
        assert_eq!(complaints[1], "WINDLASS_STATS is \"maybe\", expected one of: on, off");
    }

    /// Whether buffers are registered is one of three words, as switches are written; what cannot be read leaves the default.
    #[test]
    fn words_of_registration() {
        let words = ["auto", "AUTO", "on", "1", "Off", "no", "perhaps", ""].map(register);
        let (auto, on, off) = (Some(Register::Auto), Some(Register::On), Some(Register::Off));
        assert_eq!(words, [auto, auto, on, on, off, off, None, None]);
        let (config, complaints) = read(&[("WINDLASS_REGISTER", "perhaps"), ("WINDLASS_STAGING_MAX", "0")]);
        assert_eq!((config, complaints.len()), (Config::default(), 2));
    }

    /// docs/options.md is this table.
    #[test]
    fn documentation_is_fresh() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/options.md");
        if std::env::var_os("WINDLASS_BLESS").is_some() {
            std::fs::write(file, documentation()).unwrap();
        }
        let committed = std::fs::read_to_string(file).unwrap_or_default();
        assert!(committed == documentation(), "docs/options.md is stale: run with WINDLASS_BLESS=1");
    }
}
