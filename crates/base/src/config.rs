//! Reads Windlass's options and NCCL's variables from the environment.
//!
//! [`options`] lists Windlass's options; [`nccl`] has NCCL's own variables. Options of loading, logging and counting ([`Startup`])
//! are read at the first call. All others ([`Config`]) are read at the first unique id, init or `ncclMemAlloc`.

mod cache;

pub mod nccl;

mod table;

mod values;

use std::ffi::OsString;
use std::path::PathBuf;

use once_cell::sync::OnceCell;

use table::option;
pub use table::{Config, Description, Startup, options};

/// Variables with this prefix belong to the simulator.
const SIMULATOR_PREFIX: &str = "WINDLASS_SIM_";

/// The variable by which `windlass run` names its run to all processes of the command ([`crate::stats::run`]). It is no option.
pub const RUN: &str = "WINDLASS_RUN";

/// An unknown name that differs from an option in at most so many letters is taken for a misspelling of it.
const TYPOS_MAX: usize = 2;

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
    /// The file; none means standard error.
    pub file: Option<PathBuf>,
}

/// A switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Switch {
    On,
    Off,
}

/// Which communicators are lazy.
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

/// Whether native collectives run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Collectives {
    Auto,
    Off,
}

/// In which order reductions that round fold the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Order {
    Auto,
    Fixed,
    /// As fixed, but a call that cannot run in fixed order is refused.
    Strict,
}

/// Where the cache of measured limits is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Cache {
    Off,
    Usual,
    Folder(PathBuf),
}

/// Whether `windlass run` measures this machine's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Calibrate {
    Auto,
    /// Also on the simulator.
    On,
    Off,
}

impl Cache {
    /// The cache's folder; none where the cache is off or no home folder is known.
    pub fn folder(&self) -> Option<PathBuf> {
        match self {
            Cache::Off => None,
            Cache::Folder(folder) => Some(folder.clone()),
            Cache::Usual => cache::usual_folder(|name| std::env::var_os(name)),
        }
    }
}

static STARTUP: OnceCell<(Startup, Vec<String>)> = OnceCell::new();
static CONFIG: OnceCell<Config> = OnceCell::new();

/// The options that hold from the first call on.
pub fn startup() -> &'static Startup {
    &at_startup().0
}

/// The faults of the options at the first call, one sentence each.
pub fn complaints() -> &'static [String] {
    &at_startup().1
}

/// The value of [`RUN`], as far as it is text. For the start of the process: at its end a program may have freed its environment.
pub fn run() -> Option<String> {
    std::env::var_os(RUN)?.into_string().ok()
}

fn at_startup() -> &'static (Startup, Vec<String>) {
    STARTUP.get_or_init(|| {
        let parsed = parse(std::env::vars_os());
        (parsed.startup, [parsed.complaints, parsed.renamed].concat())
    })
}

/// The options that hold from the first unique id, init or `ncclMemAlloc` on. The first caller reads them, so a program may set
/// them after its first call, as it may set NCCL's.
pub fn config() -> &'static Config {
    CONFIG.get_or_init(|| {
        let parsed = parse(std::env::vars_os());
        let all = parsed.complaints.iter().chain(&parsed.renamed);
        say(all.filter(|complaint| !complaints().contains(complaint)));
        parsed.config
    })
}

/// Logs complaints: about `WINDLASS_ORDER` as errors, since sums are then not in the order that the user asked for,
/// and others as warnings.
pub(crate) fn say<'a>(complaints: impl Iterator<Item = &'a String>) {
    complaints.for_each(|complaint| match complaint.starts_with("WINDLASS_ORDER ") {
        true => ::log::error!("{complaint}"),
        false => ::log::warn!("{complaint}"),
    });
}

/// All options of an environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    /// The options that hold from the first call on.
    pub startup: Startup,
    /// All other options.
    pub config: Config,
    /// Names and values that cannot be used, one sentence each.
    pub complaints: Vec<String>,
    /// Earlier names that are still read, one sentence each.
    pub renamed: Vec<String>,
}

/// Reads options from variables. A value that cannot be read leaves the default and adds a complaint. If an option is set by both its
/// names, the new name holds.
pub fn parse(variables: impl Iterator<Item = (OsString, OsString)>) -> Parsed {
    let Parsed { mut startup, mut config, mut complaints, mut renamed } = Parsed::default();
    let mut says_log = false;
    let mut ours: Vec<(String, String)> = variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| {
            let is_other = name.starts_with(SIMULATOR_PREFIX) || name == RUN;
            name == "WINDLASS" || name.starts_with("WINDLASS_") && !is_other
        })
        .collect();
    ours.sort_by_key(|(name, _)| option(name).is_some_and(|option| option.name == name));
    for (name, text) in &ours {
        let Some(option) = option(name) else {
            let nearest = nearest(name).map_or(String::new(), |near| format!("; the nearest is {near}"));
            complaints.push(format!("{name} is no option{nearest}"));
            continue;
        };
        if option.name != name {
            renamed.push(format!("{name} is now called {}; the old name is still read", option.name));
        }
        says_log |= option.name == "WINDLASS_LOG";
        let taken = startup.take(option.name, text).or_else(|| config.take(option.name, text));
        if taken == Some(Err(())) {
            complaints.push(format!("{name} is \"{text}\", expected one of: {}", option.values));
        }
    }
    // Checks tell their findings by warnings, and fixed order warns where a call is not in it.
    if (config.check == Switch::On || config.order != Order::Auto) && !says_log {
        startup.log = ::log::LevelFilter::Warn;
    }
    Parsed { startup, config, complaints, renamed }
}

/// The option whose name is nearest to `name`, if at most [`TYPOS_MAX`] letters differ.
fn nearest(name: &str) -> Option<&'static str> {
    let distance = |known: &&str| strsim::levenshtein(known, name);
    options().map(|option| option.name).min_by_key(distance).filter(|known| distance(known) <= TYPOS_MAX)
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
    let row = |o: &Description| {
        let was = o.was.map_or(String::new(), |was| format!(" (was `{was}`)"));
        format!("| `{}`{was} | {} | {} | {} |\n", o.name, o.values, o.default, o.about)
    };
    let rows = options().map(row);
    let head = "# Options

Options are environment variables. This page is made from `crates/base/src/config/table.rs`.

- **When they are read.** `WINDLASS`, `WINDLASS_NCCL`, `WINDLASS_LOG`, `WINDLASS_LOG_FILE`, `WINDLASS_REPORT`, `WINDLASS_STATS` and `WINDLASS_NVTX` are read at the first NCCL call of the process.
  All others are read at the first unique id, init or `ncclMemAlloc`.
  In a program that links NCCL, `WINDLASS_NCCL` is also read when the program is loaded: set it before the program starts.
- **Earlier names** are read for one version more. If both names are set, the new name holds.
- **Mistakes.** A value that cannot be read leaves the default. `windlass run` and `windlass doctor` name such values, unknown `WINDLASS_` names and earlier names.
  A process logs them at `WINDLASS_LOG=warn`.
- `WINDLASS_SIM_` names belong to the simulator (`crates/sim`). [NCCL's variables](nccl-variables.md) lists which of NCCL's own variables Windlass follows.

| variable | values | default | what it does |
|---|---|---|---|
";
    head.to_owned() + &rows.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::values::register;
    use super::*;
    use std::time::Duration;

    fn read(pairs: &[(&str, &str)]) -> Parsed {
        parse(pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())))
    }

    /// Nothing set, and variables of others: the defaults, no complaint.
    #[test]
    fn defaults() {
        assert_eq!(
            read(&[("PATH", "/bin"), ("WINDLASSES", "2"), ("WINDLASS_SIM_DEVICES", "4"), (RUN, "7.8")]),
            Parsed::default()
        );
    }

    /// With checks or fixed order on, warnings are logged, unless `WINDLASS_LOG` is set.
    #[test]
    fn checks_are_heard() {
        let heard = |pairs: &[(&str, &str)]| read(pairs).startup.log;
        let (check, off) = (("WINDLASS_CHECK", "on"), ("WINDLASS_LOG", "off"));
        assert_eq!(heard(&[check]), ::log::LevelFilter::Warn);
        for order in [("WINDLASS_ORDER", "fixed"), ("WINDLASS_ORDER", "strict")] {
            assert_eq!(heard(&[order]), ::log::LevelFilter::Warn);
        }
        assert_eq!(heard(&[check, off]), ::log::LevelFilter::Off);
        assert_eq!(heard(&[off, check]), ::log::LevelFilter::Off);
        assert_eq!(heard(&[("WINDLASS_CHECK", "0")]), Startup::default().log);
    }

    /// Numbers are read as C reads them, for NCCL's switches.
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
            assert_eq!(values::number_as_in_c(text), value, "{text:?}");
        }
    }

    /// Every option is read.
    #[test]
    fn values() {
        let parsed = read(&[
            ("WINDLASS", "off"),
            ("WINDLASS_LOG", "INFO"),
            ("WINDLASS_LOG_FILE", "/tmp/x.%p"),
            ("WINDLASS_REPORT", "json:/tmp/r:1"),
            ("WINDLASS_STATS", "0"),
            ("WINDLASS_NVTX", "on"),
            ("WINDLASS_PEER_GROUPS", "off"),
            ("WINDLASS_LAZY", "all"),
            ("WINDLASS_FIRST_LAUNCH_GUARD", "off"),
            ("WINDLASS_CACHE_MAX", "0"),
            ("WINDLASS_SESSIONS_MAX", "7"),
            ("WINDLASS_NCCL", "/x"),
            ("WINDLASS_HEAP_MAX", "96m"),
            ("WINDLASS_POOL", "3M"),
            ("WINDLASS_REGISTER", "on"),
            ("WINDLASS_STAGING_MAX", "64M"),
            ("WINDLASS_WINDOWS", "off"),
            ("WINDLASS_CHECK", "1"),
            ("WINDLASS_COLLECTIVES", "off"),
            ("WINDLASS_ORDER", "strict"),
            ("WINDLASS_BATCH", "small"),
            ("WINDLASS_TUNING", "/tmp/t"),
            ("WINDLASS_CACHE", "/tmp/c"),
            ("WINDLASS_CALIBRATE", "off"),
            ("WINDLASS_HANG_TIMEOUT", "3"),
        ]);
        let startup = Startup {
            windlass: Switch::Off,
            log: ::log::LevelFilter::Info,
            log_file: Some("/tmp/x.%p".into()),
            report: Some(Report { form: Form::Json, file: Some("/tmp/r:1".into()) }),
            stats: Switch::Off,
            nvtx: Switch::On,
        };
        let config = Config {
            peer_groups: Switch::Off,
            lazy: Lazy::All,
            first_launch_guard: Switch::Off,
            cache_bytes_max: 0,
            sessions_max: 7,
            heap_bytes_max: 96 << 20,
            pool_bytes_max: 3 << 20,
            register: Register::On,
            collectives: Collectives::Off,
            order: Order::Strict,
            batch: Batch::Small,
            tuning: Some("/tmp/t".into()),
            cache: Cache::Folder("/tmp/c".into()),
            calibrate: Calibrate::Off,
            staging_bytes_max: 64 << 20,
            windows: Windows::Off,
            check: Switch::On,
            hang_timeout: Duration::from_secs(3),
        };
        assert_eq!(parsed, Parsed { startup, config, complaints: vec![], renamed: vec![] });
    }

    /// A misspelt name gets the nearest; a bad value names what was expected, and the default stays.
    #[test]
    fn complaints_name_the_mend() {
        let Parsed { startup, config, complaints, .. } =
            read(&[("WINDLASS_LGO", "info"), ("WINDLASS_BOGUS", "1"), ("WINDLASS_STATS", "maybe")]);
        assert_eq!((startup, config), (Startup::default(), Config::default()));
        assert_eq!(complaints[0], "WINDLASS_LGO is no option; the nearest is WINDLASS_LOG");
        assert_eq!(complaints[1], "WINDLASS_BOGUS is no option");
        assert_eq!(complaints[2], "WINDLASS_STATS is \"maybe\", expected one of: on, off");
    }

    /// `WINDLASS_WINDOWS=direct`, which earlier builds knew, leaves the default, and the complaint names the values
    /// of today.
    #[test]
    fn windows_are_direct_no_more() {
        let Parsed { config, complaints, .. } = read(&[("WINDLASS_WINDOWS", "direct")]);
        assert_eq!(config, Config::default());
        assert_eq!(complaints, ["WINDLASS_WINDOWS is \"direct\", expected one of: keep, off"]);
    }

    /// An option is read by its earlier name, too, and says what it is called now. The new name holds beside it, in any order.
    #[test]
    fn earlier_names() {
        let (was, is) = (("WINDLASS_FABRIC", "off"), ("WINDLASS_PEER_GROUPS", "on"));
        let old = read(&[was]);
        assert_eq!(old.config, Config { peer_groups: Switch::Off, ..Config::default() });
        assert_eq!(
            old.renamed,
            ["WINDLASS_FABRIC is now called WINDLASS_PEER_GROUPS; the old name is still read"]
        );
        assert_eq!(
            [read(&[was, is]).config, read(&[is, was]).config],
            [Config::default(), Config::default()]
        );
        let bad = read(&[("WINDLASS_FAST", "perhaps")]);
        assert_eq!(bad.complaints[0], "WINDLASS_FAST is \"perhaps\", expected one of: auto, off");
    }

    /// The default that the documentation tells is the default of the code.
    #[test]
    fn defaults_are_as_told() {
        for option in options() {
            let Parsed { startup, config, .. } =
                read(&[("WINDLASS_LOG", "error"), (option.name, option.default)]);
            let is_text =
                ["path", "absolute path, off", "text, json, text:path, json:path"].contains(&option.values);
            assert!(
                is_text || (startup, config) == Default::default(),
                "{} is not {}",
                option.name,
                option.default
            );
        }
    }

    /// `WINDLASS_REGISTER` takes `auto` or a switch; a value that cannot be read leaves the default.
    #[test]
    fn words_of_registration() {
        let words = ["auto", "AUTO", "on", "1", "Off", "no", "perhaps", ""].map(register);
        let (auto, on, off) = (Some(Register::Auto), Some(Register::On), Some(Register::Off));
        assert_eq!(words, [auto, auto, on, on, off, off, None, None]);
        let Parsed { config, complaints, .. } =
            read(&[("WINDLASS_REGISTER", "perhaps"), ("WINDLASS_STAGING_MAX", "0")]);
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
