//! Bar charts with scatter, as SVG.

use super::stats::Summary;
use super::table::number;
use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// One quantity of several cases.
#[derive(Debug)]
pub struct Panel {
    /// Title and unit.
    pub title: String,
    /// Each case's name and values.
    pub bars: Vec<(String, Summary)>,
    /// A limit for the first case.
    pub limit: Option<f64>,
}

/// Direction in which the values of a panel are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Smaller values are better.
    Less,
    /// Larger values are better.
    More,
}

// Sizes in pixels.
const WIDTH: u32 = 760;
const TOP: u32 = 48;
const TITLE: u32 = 34;
const BAR: u32 = 24;
const BELOW: u32 = 12;
// Space for the cases' names, and for the values.
const NAMES: u32 = 170;
const VALUES: u32 = 120;
/// Distance of texts from the edge.
const EDGE: i32 = 16;

const FONT: &str = "sans-serif";
// Sizes of texts. The backend divides them by 1.24.
const SMALL: i32 = 14;
const NORMAL: i32 = 16;
const INK: RGBColor = RGBColor(0x1a, 0x1a, 0x1a);
const FAINT: RGBColor = RGBColor(0x55, 0x55, 0x55);
const FIRST: RGBColor = RGBColor(0xc2, 0x54, 0x1b);
const OTHER: RGBColor = RGBColor(0x9a, 0xa5, 0xb1);
const LIMIT: RGBColor = RGBColor(0x0a, 0x7d, 0x3c);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws all `panels`, one below the other, under a line with the title. The background is white in any theme.
pub fn draw(heading: &str, better: Better, panels: &[Panel]) -> Result<String> {
    let mut svg = String::new();
    let height = TOP + panels.iter().map(Panel::height).sum::<u32>();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE)?;
        let better = match better {
            Better::Less => "Less",
            Better::More => "More",
        };
        let key = "Medians, whiskers from p10 to p90; dashed: the figure to hold.";
        let small = (FONT, SMALL).into_font().color(&FAINT);
        area.draw_text(heading, &small, (EDGE, 12))?;
        area.draw_text(&format!("{key} {better} is better."), &small, (EDGE, 28))?;
        let mut rest = area.split_vertically(TOP).1;
        for panel in panels {
            let (own, below) = rest.split_vertically(panel.height());
            panel.draw(&own)?;
            rest = below;
        }
        area.present()?;
    }
    Ok(svg)
}

impl Panel {
    fn height(&self) -> u32 {
        TITLE + BAR * self.bars.len() as u32 + BELOW
    }

    fn draw(&self, area: &Area<'_>) -> Result<()> {
        let title = (FONT, NORMAL, FontStyle::Bold).into_font().color(&INK);
        area.draw_text(&self.title, &title, (EDGE, 14))?;
        let ends = self.bars.iter().map(|(_, bar)| bar.p90).chain(self.limit);
        let longest = ends.fold(f64::MIN_POSITIVE, f64::max);
        let bars = area.margin(TITLE, BELOW, NAMES, VALUES);
        let rows = self.bars.len() as f64;
        let mut chart = ChartBuilder::on(&bars).build_cartesian_2d(0.0..longest, rows..0.0)?;
        for (row, (case, bar)) in self.bars.iter().enumerate() {
            let (above, middle) = (row as f64, row as f64 + 0.5);
            let colour = if row == 0 { FIRST } else { OTHER };
            let corners = [(0.0, above + 0.12), (bar.median, above + 0.88)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
            let whisker =
                ErrorBar::new_horizontal(middle, bar.p10, bar.median, bar.p90, INK.stroke_width(1), 8);
            chart.draw_series([whisker])?;
            let pixel = (TITLE + row as u32 * BAR + BAR / 2) as i32;
            let text = (FONT, NORMAL)
                .into_font()
                .color(&INK)
                .pos(Pos::new(HPos::Right, VPos::Center));
            area.draw_text(case, &text, (NAMES as i32 - 8, pixel))?;
            area.draw_text(&number(bar.median), &text, (WIDTH as i32 - EDGE, pixel))?;
        }
        if let Some(limit) = self.limit {
            let line = [(limit, 0.0), (limit, 1.0)].into_iter();
            chart.draw_series(DashedLineSeries::new(line, 4, 3, LIMIT.stroke_width(2)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_ends_within_the_picture() {
        let of = |median, p10, p90| Summary {
            median,
            p10,
            p90,
            count: 3,
        };
        let panel = Panel {
            title: "a < b".into(),
            bars: vec![
                ("husk".into(), of(50.0, 40.0, 60.0)),
                ("other".into(), of(90.0, 90.0, 100.0)),
            ],
            limit: Some(80.0),
        };
        let svg = draw("here & now", Better::Less, &[panel]).expect("a plot");
        assert!(svg.contains("Less is better"));
        assert!(svg.contains("a &lt; b") && svg.contains("here &amp; now"));
        for text in ["husk", "other", "\n50\n", "\n90\n"] {
            assert!(svg.contains(text), "{svg}");
        }
        // 50 of 100 is half the width of 470.
        assert!(svg.contains(r#"<rect x="170" y="85" width="234""#), "{svg}");
        assert!(svg.contains(r##"stroke="#0A7D3C""##), "{svg}");
    }
}
