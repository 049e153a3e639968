//! Tables and numbers for people.

/// Rows under a header, columns as wide as their widest cell; all but the first are aligned to the right.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |i: usize| {
        let cells = rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count());
        cells.chain([header[i].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &[String]| {
        let cell = |(i, (cell, &width)): (usize, (&String, &usize))| {
            if i == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        };
        cells.iter().zip(&widths).enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let header: Vec<String> = header.iter().map(|h| (*h).to_owned()).collect();
    let rule = widths.iter().map(|&w| "─".repeat(w)).collect::<Vec<_>>().join("──");
    [line(&header), rule].into_iter().chain(rows.iter().map(|row| line(row))).collect::<Vec<_>>().join("\n")
}

/// `1234567` as `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 step`, `2,000 steps`.
pub fn count(n: u64, what: &str) -> String {
    format!("{} {what}{}", thousands(n), if n == 1 { "" } else { "s" })
}

/// `1234567` as `1.23 M`.
pub fn short(x: f64) -> String {
    let (value, unit) = match x {
        x if x >= 1e12 => (x / 1e12, " T"),
        x if x >= 1e9 => (x / 1e9, " G"),
        x if x >= 1e6 => (x / 1e6, " M"),
        x if x >= 1e3 => (x / 1e3, " k"),
        x => (x, ""),
    };
    let digits = if value >= 100.0 || unit.is_empty() {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}{unit}")
}

/// Seconds as `42 s`, `3 min 20 s` or `5 h 12 min`.
pub fn duration(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        _ if seconds < 10.0 => format!("{seconds:.1} s"),
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

/// Seconds as `42s`, `3m20s` or `5h12m`.
pub fn clock(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        _ => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
    }
}

/// A number with `digits` decimals, or a dash.
pub fn optional(x: Option<f64>, digits: usize) -> String {
    x.map_or_else(|| "–".to_owned(), |x| format!("{x:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!([count(1, "step"), count(0, "step"), count(2000, "step")], ["1 step", "0 steps", "2,000 steps"]);
        assert_eq!([thousands(7), thousands(1000), thousands(1_234_567)], ["7", "1,000", "1,234,567"]);
        assert_eq!(
            [short(999.0), short(1234.0), short(12_345.0), short(9.44e12)],
            ["999", "1.23 k", "12.3 k", "9.44 T"]
        );
        assert_eq!(
            [duration(1.25), duration(42.0), duration(200.0), duration(18_720.0)],
            ["1.2 s", "42 s", "3 min 20 s", "5 h 12 min"]
        );
        assert_eq!([clock(1.25), clock(200.0), clock(18_720.0)], ["1s", "3m20s", "5h12m"]);
        assert_eq!([optional(Some(1.23456), 3), optional(None, 3)], ["1.235", "–"]);
    }

    #[test]
    fn columns_line_up() {
        let text = table(&["model", "n"], &[vec!["a".into(), "1,000".into()], vec!["longer".into(), "–".into()]]);
        assert_eq!(text, "model       n\n─────────────\na       1,000\nlonger      –");
    }
}
