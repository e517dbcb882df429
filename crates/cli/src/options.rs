//! `windlass options`: the environment variables by which Windlass is set up, and their values here.

use crate::{BadOption, text};
use anyhow::{Result, bail};
use clap::Args;
use windlass_base::config::options;

/// Options of `windlass options`.
#[derive(Args)]
pub struct Options {
    /// The name of a variable, of which everything is told [default: a line for each]
    name: Option<String>,
}

/// Prints one of them, or all.
pub fn run(Options { name }: &Options) -> Result<()> {
    let value = |name: &str| std::env::var_os(name).map(|value| value.display().to_string());
    if let Some(name) = name {
        let Some(option) = options().find(|option| option.name.eq_ignore_ascii_case(name)) else {
            bail!(BadOption(format!("{name}: expected one of the names that `windlass options` prints")));
        };
        let now = value(option.name).unwrap_or_else(|| "not set".into());
        return text::print(format!(
            "{}\n  values:   {}\n  default:  {}\n  here:     {now}\n\n{}\n",
            option.name, option.values, option.default, option.about
        ));
    }
    let rows = options().map(|option| {
        let now = value(option.name).unwrap_or_else(|| "-".into());
        vec![option.name.into(), now, option.default.into(), option.values.into()]
    });
    text::print(
        text::table(&["variable", "here", "default", "values"], rows, &[])
            + "\n`windlass options NAME` tells what one does.\n",
    )
}
