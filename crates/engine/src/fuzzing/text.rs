//! Texts that people write.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use windlass_base::config;
use windlass_base::config::nccl;
use windlass_transport::tuning::file::Table;

use super::Choices;

/// Lines of one input at most.
const LINES_MAX: usize = 16;

/// A tuning table; one that can be read is the same when it is written and read again.
pub(super) fn tuning(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Table::parse(&text) {
        Ok(table) => assert_eq!(Table::parse(&table.text()), Ok(table)),
        Err(complaint) => assert!(complaint.line <= text.lines().count().max(1), "{complaint:?}"),
    }
}

/// Variables of the environment, ours and NCCL's, and NCCL's files: a first byte that says which, then lines.
pub(super) fn options(input: &[u8]) {
    let mut choices = Choices(input);
    let (which, version) = (choices.byte(), i32::from(choices.short()));
    if which & 1 != 0 {
        return nccls(&String::from_utf8_lossy(choices.0), version);
    }
    let line = |line: &[u8]| {
        let (name, value) = line.split_at(line.iter().position(|byte| *byte == b'=').unwrap_or(line.len()));
        // A first byte below the number of options stands for that option's name.
        let name = match name {
            [index, rest @ ..] => match config::options().nth(usize::from(*index)) {
                Some(option) => [option.name.as_bytes(), rest].concat(),
                None => name.to_vec(),
            },
            [] => Vec::new(),
        };
        (OsString::from_vec(name), OsString::from_vec(value.get(1..).unwrap_or_default().to_vec()))
    };
    let parsed = config::parse(choices.0.split(|byte| *byte == b'\n').take(LINES_MAX).map(line));
    parsed.complaints.iter().for_each(|complaint| assert!(!complaint.is_empty()));
}

fn nccls(text: &str, version: i32) {
    for (name, value) in nccl::variables_of_file(text) {
        // Also where the file names another variable: each has its own values.
        for variable in nccl::VARIABLES {
            if variable.name == name || name.is_empty() {
                let found = variable.found(value.to_owned(), version);
                let settings: nccl::Settings = found.iter().map(|found| found.effect).collect();
                let _ = (settings.ctas_max(), settings.host());
                found.iter().for_each(|found| assert!(!found.to_string().is_empty()));
            }
        }
    }
}
