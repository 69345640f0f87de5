// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"reflect"

	"go.yaml.in/yaml/v3"
)

// Validate checks a configuration that another process has read: by all the rules of Parse, and without any text. name is
// that of the file, for the error, which has no true lines.
func (c *Config) Validate(name string) error {
	root := object{keys: c.keys()}.write()
	numberLines(root)
	again, err := newReader(name).config(root)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(again, c) {
		return fmt.Errorf("%s: %w", name, errNotEffective)
	}
	return nil
}

// errNotEffective: a default is missing, or what is set says the same thing twice.
var errNotEffective = errors.New("the configuration is not one that reading a file results in")

// numberLines gives nodes that come from no text a line: without one they would count as absent.
func numberLines(n *yaml.Node) {
	n.Line = 1
	for _, c := range n.Content {
		numberLines(c)
	}
}
