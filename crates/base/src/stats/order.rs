//! Fixed order (`WINDLASS_ORDER`): as a number in the counters, and in words for readers.

use crate::config::Order;

/// As it stands in the counters.
pub fn number(order: Order) -> u64 {
    order as u64
}

/// `fixed` or `strict`; empty where the order is NCCL's or Windlass's affair.
pub fn name(number: u64) -> &'static str {
    [(Order::Fixed, "fixed"), (Order::Strict, "strict")]
        .iter()
        .find(|(order, _)| self::number(*order) == number)
        .map_or("", |(_, name)| name)
}

/// One line for people, without its end: whether all was in fixed order; none where that is not asked for.
pub fn text(order: &str, lost: u64) -> Option<String> {
    match (order, lost) {
        ("", _) => None,
        (_, 0) => Some(format!("order: {order}; every reduction that rounds ran in fixed order")),
        (_, 1) => Some(format!("order: {order}; 1 reduction that rounds was not in fixed order")),
        _ => Some(format!("order: {order}; {lost} reductions that round were not in fixed order")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written reads back; the line says whether it held.
    #[test]
    fn lines() {
        let names = [Order::Auto, Order::Fixed, Order::Strict].map(|order| name(number(order)));
        assert_eq!((names, name(77)), (["", "fixed", "strict"], ""));
        assert_eq!(text("", 0), None);
        let line = text("fixed", 0).unwrap();
        assert_eq!(line, "order: fixed; every reduction that rounds ran in fixed order");
        assert_eq!(
            text("fixed", 3).unwrap(),
            "order: fixed; 3 reductions that round were not in fixed order"
        );
    }
}
