//! Runs one function many times, to be counted from outside: `instructions WHAT HOW TIMES`, with WHAT `pass`,
//! `asked`, `seen` or `group` and HOW `direct` or `through`. Two runs that differ in TIMES give the instructions of one call.

mod support;

use support::Functions;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, how, times] = &arguments[..] else { return };
    let (direct, through) = Functions::both();
    let functions = if how == "direct" { direct } else { through };
    let call = match what.as_str() {
        "pass" => Functions::call_version,
        "asked" => Functions::call_count,
        "group" => Functions::call_group,
        _ => Functions::call_all_reduce,
    };
    (0..times.parse().unwrap_or(0u64)).for_each(|_| call(&functions));
}
