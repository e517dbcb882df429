//! Fixed order (`WINDLASS_ORDER`): as a number in the counters, and in words for readers.

use crate::config::Order;

/// Added to the number of an [`Order`] when Windlass is switched off.
pub const SWITCHED_OFF: u64 = 16;

/// `fixed` or `strict`, and until when it held; empty where no order was asked for.
pub fn name(number: u64) -> &'static str {
    const FIXED: u64 = Order::Fixed as u64;
    const STRICT: u64 = Order::Strict as u64;
    const FIXED_ONCE: u64 = FIXED | SWITCHED_OFF;
    const STRICT_ONCE: u64 = STRICT | SWITCHED_OFF;
    match number {
        FIXED => "fixed",
        STRICT => "strict",
        FIXED_ONCE => "fixed until windlassDisable",
        STRICT_ONCE => "strict until windlassDisable",
        _ => "",
    }
}

/// One line for people, without a line end: how many reductions that round were in fixed order, and how many were not. None where no
/// order was asked for.
pub fn text(order: &str, (kept, lost): (u64, u64)) -> Option<String> {
    let all = kept.saturating_add(lost);
    let what = match (order, kept, lost) {
        ("", ..) => return None,
        (_, 0, 0) => "no reduction that rounds so far".to_owned(),
        (_, _, 0) => format!("all {all} reductions that round were in fixed order"),
        (order, ..) if order.starts_with("strict") => {
            format!("{lost} of {all} reductions that round were refused")
        }
        _ => format!("{lost} of {all} reductions that round were not in fixed order"),
    };
    Some(format!("order: {order}; {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written reads back; the line says whether fixed order held.
    #[test]
    fn lines() {
        let names = [Order::Auto, Order::Fixed, Order::Strict].map(|order| name(order as u64));
        assert_eq!((names, name(77)), (["", "fixed", "strict"], ""));
        assert_eq!(name(Order::Strict as u64 | SWITCHED_OFF), "strict until windlassDisable");
        assert_eq!(name(Order::Auto as u64 | SWITCHED_OFF), "");
        assert_eq!(text("", (0, 0)), None);
        let lines = [("fixed", (0, 0)), ("fixed", (7, 0)), ("fixed", (7, 3)), ("strict", (0, 1))];
        let lines = lines.map(|(order, counts)| text(order, counts).unwrap());
        assert_eq!(
            lines,
            [
                "order: fixed; no reduction that rounds so far",
                "order: fixed; all 7 reductions that round were in fixed order",
                "order: fixed; 3 of 10 reductions that round were not in fixed order",
                "order: strict; 1 of 1 reductions that round were refused",
            ]
        );
    }
}
