// Evaluates alerting rules over given series with Prometheus' own parser, engine and templates.
//
// Not promtool: its service discovery needs the libraries of every cloud, and minutes to build.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/template"
	"github.com/prometheus/prometheus/util/annotations"
)

// Question is the content of stdin.
type Question struct {
	// Rules is the text of a file of rules.
	Rules string `json:"rules"`
	// Series are in promtool's notation, `up{job="a"} 1x10 0x5`, a value for each minute from time 0 on.
	Series []string `json:"series"`
	// Minute is the time of the question; rules have been evaluated every minute until then.
	Minute int `json:"minute"`
}

// Firing is an alert that fires at the minute in question.
type Firing struct {
	Alert       string            `json:"alert"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

const step = time.Minute

var language = parser.NewParser(parser.Options{})

func main() {
	firing, err := answer()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(firing); err != nil {
		panic(err)
	}
}

func answer() ([]Firing, error) {
	var question Question
	if err := json.NewDecoder(os.Stdin).Decode(&question); err != nil {
		return nil, err
	}
	quiet := slog.New(slog.DiscardHandler)
	groups, errs := rulefmt.Parse([]byte(question.Rules), false, model.UTF8Validation, language, quiet)
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	stored, err := storageOf(question.Series)
	if err != nil {
		return nil, err
	}
	engine := promql.NewEngine(promql.EngineOpts{
		Logger: quiet, MaxSamples: 1_000_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute, Parser: language,
	})
	evaluate := func(ctx context.Context, expression string, at time.Time) (promql.Vector, error) {
		query, err := engine.NewInstantQuery(ctx, stored, nil, expression, at)
		if err != nil {
			return nil, err
		}
		defer query.Close()
		found, err := query.Exec(ctx).Vector()
		return append(promql.Vector(nil), found...), err
	}
	firing := []Firing{}
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			found, err := fires(rule, question.Minute, evaluate)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", rule.Alert, err)
			}
			firing = append(firing, found...)
		}
	}
	return firing, nil
}

// fires evaluates one rule every minute and returns what has been true for as long as the rule wants.
func fires(rule rulefmt.Rule, last int, evaluate template.QueryFunc) ([]Firing, error) {
	ctx := context.Background()
	since := map[uint64]time.Time{}
	firing := []Firing{}
	for minute := range last + 1 {
		at := time.Unix(0, 0).Add(time.Duration(minute) * step)
		vector, err := evaluate(ctx, rule.Expr, at)
		if err != nil {
			return nil, err
		}
		still := map[uint64]time.Time{}
		for _, sample := range vector {
			series := sample.Metric.Hash()
			began, known := since[series]
			if !known {
				began = at
			}
			still[series] = began
			if minute == last && at.Sub(began) >= time.Duration(rule.For) {
				alert, err := expanded(ctx, rule, sample, at, evaluate)
				if err != nil {
					return nil, err
				}
				firing = append(firing, alert)
			}
		}
		since = still
	}
	return firing, nil
}

// expanded fills in the templates of an alert's labels and annotations.
func expanded(
	ctx context.Context, rule rulefmt.Rule, sample promql.Sample, at time.Time, evaluate template.QueryFunc,
) (Firing, error) {
	of := sample.Metric.DropMetricName().Map()
	fill := func(texts map[string]string) (map[string]string, error) {
		filled := map[string]string{}
		for key, text := range texts {
			data := template.AlertTemplateData(of, nil, "", sample)
			text = "{{$labels := .Labels}}{{$value := .Value}}" + text
			one, err := template.NewTemplateExpander(
				ctx, text, rule.Alert, data, model.TimeFromUnix(at.Unix()), evaluate, &url.URL{}, nil,
			).Expand()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", key, err)
			}
			filled[key] = one
		}
		return filled, nil
	}
	added, err := fill(rule.Labels)
	if err != nil {
		return Firing{}, err
	}
	filled, err := fill(rule.Annotations)
	maps.Copy(of, added)
	return Firing{rule.Alert, of, filled}, err
}

// storageOf holds the series in memory.
func storageOf(descriptions []string) (storage.Queryable, error) {
	held := []promql.Series{}
	for _, description := range descriptions {
		metric, values, err := language.ParseSeriesDesc(strings.TrimSpace(description))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", description, err)
		}
		series := promql.Series{Metric: metric}
		for minute, value := range values {
			if !value.Omitted {
				at := (time.Duration(minute) * step).Milliseconds()
				series.Floats = append(series.Floats, promql.FPoint{T: at, F: value.Value})
			}
		}
		held = append(held, series)
	}
	querier := &storage.MockQuerier{
		SelectMockFunction: func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
			found := &seriesSet{next: -1}
			for _, series := range held {
				if matches(series.Metric, matchers) {
					found.series = append(found.series, promql.NewStorageSeries(series))
				}
			}
			return found
		},
	}
	return storage.QueryableFunc(func(int64, int64) (storage.Querier, error) { return querier, nil }), nil
}

// seriesSet walks over series.
type seriesSet struct {
	series []storage.Series
	next   int
}

func (set *seriesSet) Next() bool {
	set.next++
	return set.next < len(set.series)
}

func (set *seriesSet) At() storage.Series { return set.series[set.next] }

func (*seriesSet) Err() error { return nil }

func (*seriesSet) Warnings() annotations.Annotations { return nil }

func matches(metric labels.Labels, matchers []*labels.Matcher) bool {
	for _, matcher := range matchers {
		if !matcher.Matches(metric.Get(matcher.Name)) {
			return false
		}
	}
	return true
}
