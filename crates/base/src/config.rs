//! Reads Windlass's options and NCCL's variables from the environment.
//!
//! [`options`] lists Windlass's options; [`nccl`] has NCCL's own variables. Options of loading, logging and counting ([`Startup`])
//! are read at the first call. All others ([`Config`]) are read at the first unique id, init or `ncclMemAlloc`.

pub mod nccl;

mod removed;

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

/// The variable by which `windlass run` says why it has not measured this machine's limits; empty where it has. It is no option.
pub const UNMEASURED: &str = "WINDLASS_UNMEASURED";

/// The variables that wake parts of the Python packages (`python/autoload`, `_plugins.py`), and their values. They are no options of the
/// library.
const OF_AUTOLOAD: (&str, &str) = ("WINDLASS_PYTHON", "off, on");
const OF_PLUGINS: (&[&str], &str) =
    (&["WINDLASS_VLLM", "WINDLASS_SGLANG"], "off, auto, intervals of bytes, as 4K-64K,8M-");

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

impl Cache {
    /// The cache's folder; none where the cache is off or no home folder is known.
    pub fn folder(&self) -> Option<PathBuf> {
        match self {
            Cache::Off => None,
            Cache::Folder(folder) => Some(folder.clone()),
            Cache::Usual => usual_folder(|name| std::env::var_os(name)),
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

/// The value of [`RUN`] or [`UNMEASURED`], as far as it is text. Not for the end of the process: a program may have freed its environment.
pub fn of_run(name: &str) -> Option<String> {
    std::env::var_os(name)?.into_string().ok()
}

fn at_startup() -> &'static (Startup, Vec<String>) {
    STARTUP.get_or_init(|| {
        let parsed = parse(environment());
        (parsed.startup, [parsed.complaints, parsed.removed].concat())
    })
}

/// The options that hold from the first unique id, init or `ncclMemAlloc` on. The first caller reads them, so a program may set
/// them after its first call, as it may set NCCL's.
pub fn config() -> &'static Config {
    CONFIG.get_or_init(|| {
        let parsed = parse(environment());
        let all = parsed.complaints.iter().chain(&parsed.removed);
        say(all.filter(|complaint| !complaints().contains(complaint)));
        parsed.config
    })
}

/// Logs complaints. Errors are those about `WINDLASS_ORDER`, since sums are then not in the order that the user asked for. So are those about
/// `WINDLASS`, which may have been meant to switch Windlass off, and about options that this version no longer reads, unless `windlass run`
/// has told of these. Others are warnings.
pub(crate) fn say<'a>(complaints: impl Iterator<Item = &'a String>) {
    let is_told = of_run(RUN).is_some() || startup().windlass == Switch::Off;
    complaints.for_each(|complaint| {
        let name = complaint.split(' ').next().unwrap_or_default();
        match (name == "WINDLASS_ORDER", name == "WINDLASS" || removed::instead(name).is_some()) {
            (_, true) if is_told && name == "WINDLASS" => ::log::warn!("{complaint}"),
            (_, true) if is_told => {}
            (true, _) | (_, true) => ::log::error!("{complaint}"),
            _ => ::log::warn!("{complaint}"),
        }
    });
}

/// Options that name files.
const OF_FILES: [&str; 4] = ["WINDLASS_LOG_FILE", "WINDLASS_REPORT", "WINDLASS_TUNING", "WINDLASS_CACHE"];

/// This process's variables. With more rights than its user it reads and writes no files that the user names.
fn environment() -> impl Iterator<Item = (OsString, OsString)> {
    let is_privileged = nccl_sys::find::is_privileged();
    let all = std::env::vars_os()
        .filter(move |(name, _)| !is_privileged || OF_FILES.iter().all(|file| name != file));
    all.chain(is_privileged.then(|| ("WINDLASS_CACHE".into(), "off".into())))
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
    /// Options of earlier versions that are no longer read, one sentence each.
    pub removed: Vec<String>,
}

/// Reads options from variables. A value that cannot be read leaves the default and adds a complaint.
pub fn parse(variables: impl Iterator<Item = (OsString, OsString)>) -> Parsed {
    let Parsed { mut startup, mut config, mut complaints, mut removed } = Parsed::default();
    let mut says_log = false;
    let ours = variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| {
            let is_other = name.starts_with(SIMULATOR_PREFIX) || [RUN, UNMEASURED].contains(&name.as_str());
            // A letter may be missing in the prefix, also where Windlass shall be off.
            name == "WINDLASS"
                || name.starts_with("WINDLASS_") && !is_other
                || name.starts_with("WINDL") && name.contains('_') && nearest(name).is_some()
                || name == "WINDLAS"
        });
    for (name, text) in ours {
        if let Some(instead) = removed::instead(&name) {
            removed.push(format!("{name} is no longer read: {instead}"));
            continue;
        }
        if let Some((is_usable, expected)) = of_python(&name, &text) {
            if !is_usable {
                complaints
                    .push(format!("{name} is \"{text}\", expected: {expected}; its default holds: off"));
            }
            continue;
        }
        let Some(option) = option(&name) else {
            let nearest = nearest(&name).map_or(String::new(), |near| {
                format!("; the nearest is {}, which is {} unless it is set", near.name, near.default)
            });
            complaints.push(format!("{name}=\"{text}\" has no effect: it is no option{nearest}"));
            continue;
        };
        says_log |= option.name == "WINDLASS_LOG";
        let taken = startup.take(option.name, &text).or_else(|| config.take(option.name, &text));
        if taken == Some(Err(())) {
            complaints.push(format!(
                "{name} is \"{text}\", expected: {}; its default holds: {}",
                option.values, option.default
            ));
        }
    }
    // Fixed order warns where a call is not in it.
    if config.order != Order::Auto && !says_log {
        startup.log = ::log::LevelFilter::Warn;
    }
    Parsed { startup, config, complaints, removed }
}

/// Whether a variable of the Python packages has a value that they take, and what they expect. None for other variables.
fn of_python(name: &str, text: &str) -> Option<(bool, &'static str)> {
    if name == OF_AUTOLOAD.0 {
        return Some((
            ["", "on"].contains(&text) || values::switch(text) == Some(Switch::Off),
            OF_AUTOLOAD.1,
        ));
    }
    OF_PLUGINS.0.contains(&name).then(|| (values::is_for_plugin(text), OF_PLUGINS.1))
}

/// The option whose name is nearest to `name`, if at most [`TYPOS_MAX`] letters differ.
fn nearest(name: &str) -> Option<&'static Description> {
    let distance = |known: &&Description| strsim::levenshtein(known.name, name);
    options().min_by_key(distance).filter(|known| distance(known) <= TYPOS_MAX)
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

/// The usual folder, by the environment: in `XDG_CACHE_HOME`, or in the home's `.cache`. None where neither is known.
fn usual_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?;
    Some(caches.join("windlass"))
}

#[cfg(test)]
mod tests {
    use super::values::register;
    use super::*;
    use std::time::Duration;

    fn read(pairs: &[(&str, &str)]) -> Parsed {
        parse(pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())))
    }

    /// The part of a set-user-id process, which only the next test runs.
    #[test]
    #[ignore = "a process of another test"]
    fn privileged_part() {
        println!("part: {} {:?} {:?}", nccl_sys::find::is_privileged(), startup(), config());
    }

    /// A process with more rights than its user names no files by its options. All others hold.
    #[test]
    fn privileged() {
        use std::os::unix::fs::PermissionsExt;
        use std::os::unix::process::CommandExt;
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        let all = |mode| std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(folder.path(), all(0o755)).unwrap();
        std::fs::set_permissions(&program, all(0o4755)).unwrap();
        let mut command = std::process::Command::new(&program);
        command.args(["--exact", "config::tests::privileged_part", "--ignored", "--nocapture"]);
        command
            .env("WINDLASS_ORDER", "strict")
            .env("WINDLASS_REPORT", "text:/a")
            .env("WINDLASS_LOG_FILE", "/a");
        command.env("WINDLASS_TUNING", "/a").env("WINDLASS_CACHE", "/a").env("HOME", "/a").uid(65534);
        // Only root can give rights away, and a file system may take none.
        let Ok(output) = command.output() else { return };
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        if !printed.contains("part: true") {
            return println!("skipped: {printed}");
        }
        assert!(printed.contains("order: Strict") && printed.contains("cache: Off"), "{printed}");
        assert!(!printed.contains("/a"), "{printed}");
    }

    /// Nothing set, and variables of others: the defaults, no complaint.
    #[test]
    fn defaults() {
        assert_eq!(
            read(&[
                ("PATH", "/bin"),
                ("WINDLASSES", "2"),
                ("WINDLASS_SIM_DEVICES", "4"),
                (RUN, "7.8"),
                (UNMEASURED, ""),
                (OF_AUTOLOAD.0, "on"),
                (OF_PLUGINS.0[0], "auto"),
                (OF_PLUGINS.0[1], "8M-")
            ]),
            Parsed::default()
        );
    }

    /// With an order of sums warnings are logged, unless `WINDLASS_LOG` is set.
    #[test]
    fn orders_are_heard() {
        let heard = |pairs: &[(&str, &str)]| read(pairs).startup.log;
        let (fixed, off) = (("WINDLASS_ORDER", "fixed"), ("WINDLASS_LOG", "off"));
        assert_eq!(heard(&[fixed]), ::log::LevelFilter::Warn);
        assert_eq!(heard(&[("WINDLASS_ORDER", "strict")]), ::log::LevelFilter::Warn);
        assert_eq!(heard(&[fixed, off]), ::log::LevelFilter::Off);
        assert_eq!(heard(&[off, fixed]), ::log::LevelFilter::Off);
        assert_eq!(heard(&[("WINDLASS_ORDER", "auto")]), Startup::default().log);
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
            ("WINDLASS_PEER_GROUPS", "off"),
            ("WINDLASS_LAZY", "all"),
            ("WINDLASS_FIRST_LAUNCH_GUARD", "off"),
            ("WINDLASS_CACHE_MAX", "0"),
            ("WINDLASS_NCCL", "/x"),
            ("WINDLASS_HEAP_MAX", "96m"),
            ("WINDLASS_POOL", "3M"),
            ("WINDLASS_REGISTER", "on"),
            ("WINDLASS_COLLECTIVES", "off"),
            ("WINDLASS_ORDER", "strict"),
            ("WINDLASS_TUNING", "/tmp/t"),
            ("WINDLASS_CACHE", "/tmp/c"),
            ("WINDLASS_HANG_TIMEOUT", "3"),
        ]);
        let startup = Startup {
            windlass: Switch::Off,
            log: ::log::LevelFilter::Info,
            log_file: Some("/tmp/x.%p".into()),
            report: Some(Report { form: Form::Json, file: Some("/tmp/r:1".into()) }),
            stats: Switch::Off,
        };
        let config = Config {
            peer_groups: Switch::Off,
            lazy: Lazy::All,
            first_launch_guard: Switch::Off,
            cache_bytes_max: 0,
            heap_bytes_max: 96 << 20,
            pool_bytes_max: 3 << 20,
            register: Register::On,
            collectives: Collectives::Off,
            order: Order::Strict,
            tuning: Some("/tmp/t".into()),
            cache: Cache::Folder("/tmp/c".into()),
            hang_timeout: Duration::from_secs(3),
        };
        assert_eq!(parsed, Parsed { startup, config, complaints: vec![], removed: vec![] });
    }

    /// A misspelt name gets the nearest; a bad value names what was expected, and the default stays.
    #[test]
    fn complaints_name_the_mend() {
        let Parsed { startup, config, complaints, .. } = read(&[
            ("WINDLASS_LGO", "info"),
            ("WINDLASS_BOGUS", "1"),
            ("WINDLASS_STATS", "maybe"),
            ("WINDLAS_ORDER", "fixed"),
        ]);
        assert_eq!((startup, config), (Startup::default(), Config::default()));
        assert_eq!(
            complaints[0],
            "WINDLASS_LGO=\"info\" has no effect: it is no option; the nearest is WINDLASS_LOG, which is error unless it is set"
        );
        assert_eq!(
            complaints[3],
            "WINDLAS_ORDER=\"fixed\" has no effect: it is no option; the nearest is WINDLASS_ORDER, which is auto unless it is set"
        );
        let valid = ["off", "auto", "AUTO", "8M-", "4K-64K,8M-", "0-1"].map(|value| ("WINDLASS_VLLM", value));
        assert_eq!(read(&valid).complaints, [""; 0]);
        assert_eq!(complaints[1], "WINDLASS_BOGUS=\"1\" has no effect: it is no option");
        assert_eq!(complaints[2], "WINDLASS_STATS is \"maybe\", expected: on, off; its default holds: on");
    }

    /// An option that is no longer read is named with what to do instead, whatever its value is, and changes nothing. No such
    /// name is an option.
    #[test]
    fn removed_options() {
        let parsed =
            read(&[("WINDLASS_BATCH", "perhaps"), ("WINDLASS_LOG", "error"), ("WINDLASS_FABRIC", "off")]);
        let told = [
            "WINDLASS_BATCH is no longer read: unset it; WINDLASS_COLLECTIVES=off switches off all native collectives",
            "WINDLASS_FABRIC is no longer read: use WINDLASS_PEER_GROUPS instead",
        ];
        assert_eq!(parsed, Parsed { removed: told.map(str::to_owned).to_vec(), ..Parsed::default() });
        assert!(options().all(|option| removed::instead(option.name).is_none()));
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
            read(&[("WINDLASS_REGISTER", "perhaps"), ("WINDLASS_HEAP_MAX", "0")]);
        assert_eq!((config, complaints.len()), (Config::default(), 2));
    }

    /// The text of `docs/options.md`.
    fn documentation() -> String {
        let head = "# Options

Options are environment variables. This page is made from `crates/base/src/config/table.rs`.

- **When they are read.** `WINDLASS`, `WINDLASS_NCCL`, `WINDLASS_LOG`, `WINDLASS_LOG_FILE`, `WINDLASS_REPORT` and `WINDLASS_STATS` are read at the first NCCL call of the process.
  All others are read at the first unique id, init or `ncclMemAlloc`.
  In a program that links NCCL, `WINDLASS_NCCL` is also read when the program is loaded: set it before the program starts.
- **Mistakes.** A value that cannot be read leaves the default. `windlass run` and `windlass doctor` name such values and unknown `WINDLASS_` names.
  A process logs them at `WINDLASS_LOG=warn`, and at `error` where it cannot read `WINDLASS` itself.
- **Options of 0.2** that 0.3 does not read change nothing. `windlass run` and `windlass doctor` name each, and what to do instead. Without `windlass run` a process logs them at `error`.
- **On and off** are also 1 and 0, yes and no, true and false, in any case.
- `WINDLASS_PYTHON` belongs to [windlass-autoload](launchers.md#windlass-autoload), `WINDLASS_VLLM` and `WINDLASS_SGLANG` to the plugins of [vLLM](vllm.md#the-plugin) and [SGLang](sglang.md).
- `WINDLASS_SIM_` names belong to the simulator (`crates/sim`). [NCCL's variables](nccl-variables.md) lists which of NCCL's own variables Windlass follows.

| variable | default |
|---|---|
";
        let anchor = |o: &Description| o.name.to_lowercase();
        let row = |o: &Description| format!("| [`{}`](#{}) | {} |\n", o.name, anchor(o), o.default);
        let section = |o: &Description| {
            format!("\n## {}\n\nValues: {}. Default: {}.\n\n{}\n", o.name, o.values, o.default, o.about)
        };
        head.to_owned() + &options().map(row).chain(options().map(section)).collect::<String>()
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

#[cfg(test)]
mod cache_tests {
    use super::*;

    /// A relative path does not count, as the XDG specification says.
    #[test]
    fn folders() {
        let of = |xdg: Option<&str>, home: Option<&str>| {
            usual_folder(|name| if name == "HOME" { home } else { xdg }.map(OsString::from))
        };
        assert_eq!(of(Some("/c"), Some("/h")), Some("/c/windlass".into()));
        assert_eq!(of(Some("c"), Some("/h")), Some("/h/.cache/windlass".into()));
        assert_eq!(of(None, Some("/h")), Some("/h/.cache/windlass".into()));
        assert_eq!([of(None, None), of(Some(""), Some(""))], [None, None]);
    }
}
